"""How endpoints answer"""
import hashlib

import sqlalchemy as sa
from alembic import op

revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None

_PENDING = sa.text("state = 'pending'")
_PAGE = sa.text('SELECT id, url FROM deliveries WHERE id > :after ORDER BY id LIMIT 1000')
_SET = sa.text('UPDATE deliveries SET endpoint = :endpoint WHERE id = :id')
_FAILING = sa.text("standing = 'failing'")


def upgrade() -> None:
    op.create_table(
        'endpoints',
        sa.Column('id', sa.String(length=64), nullable=False),
        sa.Column('host', sa.String(length=300), nullable=False),
        sa.Column('standing', sa.String(length=16), nullable=False),
        sa.Column('failures', sa.Integer(), server_default='0', nullable=False),
        sa.Column('failing_since', sa.DateTime(timezone=True), nullable=True),
        sa.Column('paused_until', sa.DateTime(timezone=True), nullable=True),
        sa.Column('noted_at', sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("standing IN ('well', 'slow', 'failing')", name=op.f('ck_endpoints_standing')),
        sa.CheckConstraint("(standing = 'failing') = (failing_since IS NOT NULL)", name=op.f('ck_endpoints_failing_has_begun')),
        sa.CheckConstraint("paused_until IS NULL OR standing = 'failing'", name=op.f('ck_endpoints_paused_is_failing')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_endpoints')),
    )
    op.create_index('ix_endpoints_failing', 'endpoints', ['paused_until'], sqlite_where=_FAILING, postgresql_where=_FAILING)
    op.create_index('ix_endpoints_noted_at', 'endpoints', ['noted_at'])
    op.create_index('ix_endpoints_host_noted_at', 'endpoints', ['host', 'noted_at'])
    op.add_column('deliveries', sa.Column('endpoint', sa.String(length=64), server_default='', nullable=False))
    _fill(op.get_bind())
    op.create_index('ix_deliveries_pending_endpoint', 'deliveries', ['endpoint', 'next_attempt_at'], sqlite_where=_PENDING, postgresql_where=_PENDING)


def _fill(tx: sa.Connection) -> None:
    after = ''
    while rows := tx.execute(_PAGE, {'after': after}).all():
        tx.execute(_SET, [{'endpoint': hashlib.sha256(url.partition('?')[0].encode()).hexdigest(), 'id': id} for id, url in rows])
        after = rows[-1].id


def downgrade() -> None:
    op.drop_index('ix_deliveries_pending_endpoint', table_name='deliveries')
    op.drop_column('deliveries', 'endpoint')
    op.drop_table('endpoints')
