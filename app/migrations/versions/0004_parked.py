"""Counting what is parked without walking through the backlog."""
from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    parked = sa.text("state = 'parked'")
    op.create_index("ix_outbox_parked", "outbox", ["id"], sqlite_where=parked, postgresql_where=parked)


def downgrade() -> None:
    op.drop_index("ix_outbox_parked", table_name="outbox")
