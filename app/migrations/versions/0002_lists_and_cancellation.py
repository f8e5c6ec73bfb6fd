"""Lists, places in the queue, and cancellation"""
import sqlalchemy as sa
from alembic import op

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

_QUEUED = sa.text("status = 'queued'")
_FINISHED = sa.text("finished_at IS NOT NULL AND started_at IS NOT NULL")


def upgrade() -> None:
    op.add_column('jobs', sa.Column('cancel_requested_at', sa.DateTime(timezone=True), nullable=True))
    op.create_index('ix_jobs_queued', 'jobs', ['queue', 'created_at'], sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    op.create_index('ix_jobs_kind_finished_at', 'jobs', ['kind', 'finished_at'], sqlite_where=_FINISHED, postgresql_where=_FINISHED)
    op.create_index('ix_jobs_owner_id', 'jobs', ['owner', 'id'])
    op.create_index('ix_jobs_owner_status_id', 'jobs', ['owner', 'status', 'id'])
    op.create_index('ix_jobs_owner_kind_id', 'jobs', ['owner', 'kind', 'id'])
    op.create_index('ix_notes_owner_id', 'notes', ['owner', 'id'])


def downgrade() -> None:
    op.drop_index('ix_notes_owner_id', table_name='notes')
    op.drop_index('ix_jobs_owner_kind_id', table_name='jobs')
    op.drop_index('ix_jobs_owner_status_id', table_name='jobs')
    op.drop_index('ix_jobs_owner_id', table_name='jobs')
    op.drop_index('ix_jobs_kind_finished_at', table_name='jobs')
    op.drop_index('ix_jobs_queued', table_name='jobs')
    op.drop_column('jobs', 'cancel_requested_at')
