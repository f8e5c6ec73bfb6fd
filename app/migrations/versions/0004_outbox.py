"""Rows that may share a message; counting what is parked without walking through the backlog."""
from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("outbox", sa.Column("together", sa.String(length=64), nullable=True))
    parked = sa.text("state = 'parked'")
    op.create_index("ix_outbox_parked", "outbox", ["id"], sqlite_where=parked, postgresql_where=parked)


def downgrade() -> None:
    op.drop_index("ix_outbox_parked", table_name="outbox")
    op.drop_column("outbox", "together")
