"""The first tables"""
import sqlalchemy as sa
from alembic import op

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'idempotency_keys',
        sa.Column('owner', sa.String(length=255), nullable=False),
        sa.Column('key', sa.String(length=255), nullable=False),
        sa.Column('fingerprint', sa.String(length=64), nullable=False),
        sa.Column('job_id', sa.String(length=36), nullable=False),
        sa.Column('note_id', sa.Integer(), nullable=True),
        sa.Column('body', sa.Text(), nullable=False),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint('owner', 'key', name=op.f('pk_idempotency_keys'))
    )
    op.create_index('ix_idempotency_keys_created_at', 'idempotency_keys', ['created_at'], unique=False)
    op.create_table(
        'notes',
        sa.Column('id', sa.Integer(), autoincrement=True, nullable=False),
        sa.Column('owner', sa.String(length=255), nullable=False),
        sa.Column('text', sa.Text(), nullable=False),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint('length(text) BETWEEN 1 AND 10000', name=op.f('ck_notes_text_length')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_notes')),
        sqlite_autoincrement=True
    )
    op.create_table(
        'outbox',
        sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
        sa.Column('task', sa.String(length=32), nullable=False),
        sa.Column('target_id', sa.String(length=64), nullable=False),
        sa.Column('queue', sa.String(length=255), nullable=False),
        sa.Column('time_limit_seconds', sa.Float(), nullable=True),
        sa.Column('state', sa.String(length=16), nullable=False),
        sa.Column('available_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('lease', sa.String(length=36), nullable=True),
        sa.Column('leased_until', sa.DateTime(timezone=True), nullable=True),
        sa.Column('published_at', sa.DateTime(timezone=True), nullable=True),
        sa.Column('failures', sa.Integer(), server_default='0', nullable=False),
        sa.Column('last_error', sa.Text(), nullable=True),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "(state = 'leased') = (lease IS NOT NULL AND leased_until IS NOT NULL)",
            name=op.f('ck_outbox_leased_has_lease')),
        sa.CheckConstraint("state IN ('waiting', 'leased', 'published', 'parked')", name=op.f('ck_outbox_state')),
        sa.CheckConstraint("task IN ('run_job', 'deliver_webhook')", name=op.f('ck_outbox_task')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_outbox')),
        sa.UniqueConstraint('task', 'target_id', name=op.f('uq_outbox_task_target_id')),
        sqlite_autoincrement=True
    )
    op.create_index(
        'ix_outbox_available_at', 'outbox', ['available_at', 'id'], unique=False,
        sqlite_where=sa.text("state = 'waiting'"), postgresql_where=sa.text("state = 'waiting'"))
    op.create_index(
        'ix_outbox_leased_until', 'outbox', ['leased_until'], unique=False,
        sqlite_where=sa.text("state = 'leased'"), postgresql_where=sa.text("state = 'leased'"))
    op.create_index(
        'ix_outbox_published_at', 'outbox', ['queue', 'published_at'], unique=False,
        sqlite_where=sa.text("state = 'published'"), postgresql_where=sa.text("state = 'published'"))
    op.create_table(
        'tombstones',
        sa.Column('job_id', sa.String(length=36), nullable=False),
        sa.Column('owner', sa.String(length=255), nullable=False),
        sa.Column('kind', sa.String(length=255), nullable=False),
        sa.Column('status', sa.String(length=16), nullable=False),
        sa.Column('finished_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('expired_at', sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("status IN ('succeeded', 'failed')", name=op.f('ck_tombstones_status')),
        sa.PrimaryKeyConstraint('job_id', name=op.f('pk_tombstones'))
    )
    op.create_index('ix_tombstones_expired_at', 'tombstones', ['expired_at'], unique=False)
    op.create_table(
        'history_events',
        sa.Column('id', sa.Integer(), autoincrement=True, nullable=False),
        sa.Column('note_id', sa.Integer(), nullable=False),
        sa.Column('kind', sa.String(length=16), nullable=False),
        sa.Column('job_id', sa.String(length=36), nullable=False),
        sa.Column('at', sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("kind IN ('created')", name=op.f('ck_history_events_kind')),
        sa.ForeignKeyConstraint(['note_id'], ['notes.id'], name=op.f('fk_history_events_note_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_history_events')),
        sa.UniqueConstraint('note_id', 'kind', name=op.f('uq_history_events_note_id_kind')),
        sqlite_autoincrement=True
    )
    op.create_table(
        'jobs',
        sa.Column('id', sa.String(length=36), nullable=False),
        sa.Column('owner', sa.String(length=255), nullable=False),
        sa.Column('kind', sa.String(length=255), nullable=False),
        sa.Column('queue', sa.String(length=255), nullable=False),
        sa.Column('status', sa.String(length=16), nullable=False),
        sa.Column('version', sa.Integer(), server_default='0', nullable=False),
        sa.Column('attempt', sa.Integer(), server_default='0', nullable=False),
        sa.Column('max_attempts', sa.Integer(), nullable=False),
        sa.Column('time_limit_seconds', sa.Float(), nullable=False),
        sa.Column('input', sa.Text(), nullable=False),
        sa.Column('result', sa.Text(), nullable=True),
        sa.Column('error_code', sa.String(length=16), nullable=True),
        sa.Column('error_message', sa.Text(), nullable=True),
        sa.Column('progress_done', sa.BigInteger(), nullable=True),
        sa.Column('progress_total', sa.BigInteger(), nullable=True),
        sa.Column('note_id', sa.Integer(), nullable=True),
        sa.Column('callback_url', sa.Text(), nullable=True),
        sa.Column('worker', sa.String(length=255), nullable=True),
        sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
        sa.Column('published_at', sa.DateTime(timezone=True), nullable=True),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('started_at', sa.DateTime(timezone=True), nullable=True),
        sa.Column('finished_at', sa.DateTime(timezone=True), nullable=True),
        sa.Column('expires_at', sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name=op.f('ck_jobs_failed_has_error')),
        sa.CheckConstraint("(status = 'running') = (lease_until IS NOT NULL)", name=op.f('ck_jobs_running_has_lease')),
        sa.CheckConstraint("(status = 'succeeded') = (result IS NOT NULL)", name=op.f('ck_jobs_succeeded_has_result')),
        sa.CheckConstraint(
            "(status IN ('succeeded', 'failed')) = (finished_at IS NOT NULL AND expires_at IS NOT NULL)",
            name=op.f('ck_jobs_final_has_end')),
        sa.CheckConstraint(
            "error_code IN ('exception', 'refused', 'timeout', 'crashed', 'bad_result', 'cancelled')",
            name=op.f('ck_jobs_error_code')),
        sa.CheckConstraint("status IN ('queued', 'running', 'succeeded', 'failed')", name=op.f('ck_jobs_status')),
        sa.CheckConstraint('attempt BETWEEN 0 AND max_attempts', name=op.f('ck_jobs_attempt')),
        sa.ForeignKeyConstraint(['note_id'], ['notes.id'], name=op.f('fk_jobs_note_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_jobs'))
    )
    op.create_index(
        'ix_jobs_expires_at', 'jobs', ['expires_at'], unique=False,
        sqlite_where=sa.text('expires_at IS NOT NULL'), postgresql_where=sa.text('expires_at IS NOT NULL'))
    op.create_index(
        'ix_jobs_lease_until', 'jobs', ['lease_until'], unique=False,
        sqlite_where=sa.text("status = 'running'"), postgresql_where=sa.text("status = 'running'"))
    op.create_index(
        'ix_jobs_queue_started_at', 'jobs', ['queue', 'started_at'], unique=False,
        sqlite_where=sa.text('started_at IS NOT NULL'), postgresql_where=sa.text('started_at IS NOT NULL'))
    op.create_index(
        'ix_jobs_unfinished', 'jobs', ['created_at'], unique=False,
        sqlite_where=sa.text("status IN ('queued', 'running')"), postgresql_where=sa.text("status IN ('queued', 'running')"))
    op.create_table(
        'deliveries',
        sa.Column('id', sa.String(length=64), nullable=False),
        sa.Column('job_id', sa.String(length=36), nullable=False),
        sa.Column('url', sa.Text(), nullable=False),
        sa.Column('host', sa.String(length=300), nullable=False),
        sa.Column('state', sa.String(length=16), nullable=False),
        sa.Column('attempts', sa.Integer(), server_default='0', nullable=False),
        sa.Column('next_attempt_at', sa.DateTime(timezone=True), nullable=True),
        sa.Column('leased_until', sa.DateTime(timezone=True), nullable=True),
        sa.Column('last_response', sa.Integer(), nullable=True),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('finished_at', sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state = 'pending') = (next_attempt_at IS NOT NULL)",
            name=op.f('ck_deliveries_pending_is_due')),
        sa.CheckConstraint(
            "(state = 'sending') = (leased_until IS NOT NULL)",
            name=op.f('ck_deliveries_sending_has_lease')),
        sa.CheckConstraint(
            "state IN ('pending', 'sending', 'delivered', 'exhausted', 'gone', 'refused')",
            name=op.f('ck_deliveries_state')),
        sa.ForeignKeyConstraint(['job_id'], ['jobs.id'], name=op.f('fk_deliveries_job_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_deliveries'))
    )
    op.create_index('ix_deliveries_job_id', 'deliveries', ['job_id'], unique=False)
    op.create_index(
        'ix_deliveries_leased_until', 'deliveries', ['leased_until'], unique=False,
        sqlite_where=sa.text("state = 'sending'"), postgresql_where=sa.text("state = 'sending'"))
    op.create_index('ix_deliveries_pending_host', 'deliveries', ['host', 'next_attempt_at'], unique=False, sqlite_where=sa.text("state = 'pending'"), postgresql_where=sa.text("state = 'pending'"))
    op.create_index('ix_deliveries_next_attempt_at', 'deliveries', ['next_attempt_at'], unique=False, sqlite_where=sa.text("state = 'pending'"), postgresql_where=sa.text("state = 'pending'"))
    op.create_index(
        'ix_deliveries_sending_host', 'deliveries', ['host'], unique=False,
        sqlite_where=sa.text("state = 'sending'"), postgresql_where=sa.text("state = 'sending'"))
    op.create_table(
        'delivery_attempts',
        sa.Column('delivery_id', sa.String(length=64), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('response_code', sa.Integer(), nullable=True),
        sa.Column('error', sa.Text(), nullable=True),
        sa.Column('duration_seconds', sa.Float(), nullable=False),
        sa.Column('excerpt', sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(['delivery_id'], ['deliveries.id'], name=op.f('fk_delivery_attempts_delivery_id'), ondelete='CASCADE'),
        sa.PrimaryKeyConstraint('delivery_id', 'attempt', name=op.f('pk_delivery_attempts'))
    )


def downgrade() -> None:
    op.drop_table('delivery_attempts')
    op.drop_index('ix_deliveries_pending_host', table_name='deliveries')
    op.drop_index('ix_deliveries_next_attempt_at', table_name='deliveries')
    op.drop_index('ix_deliveries_sending_host', table_name='deliveries', sqlite_where=sa.text("state = 'sending'"), postgresql_where=sa.text("state = 'sending'"))
    op.drop_index('ix_deliveries_leased_until', table_name='deliveries', sqlite_where=sa.text("state = 'sending'"), postgresql_where=sa.text("state = 'sending'"))
    op.drop_index('ix_deliveries_job_id', table_name='deliveries')
    op.drop_table('deliveries')
    op.drop_index('ix_jobs_unfinished', table_name='jobs', sqlite_where=sa.text("status IN ('queued', 'running')"), postgresql_where=sa.text("status IN ('queued', 'running')"))
    op.drop_index('ix_jobs_queue_started_at', table_name='jobs', sqlite_where=sa.text('started_at IS NOT NULL'), postgresql_where=sa.text('started_at IS NOT NULL'))
    op.drop_index('ix_jobs_lease_until', table_name='jobs', sqlite_where=sa.text("status = 'running'"), postgresql_where=sa.text("status = 'running'"))
    op.drop_index('ix_jobs_expires_at', table_name='jobs', sqlite_where=sa.text('expires_at IS NOT NULL'), postgresql_where=sa.text('expires_at IS NOT NULL'))
    op.drop_table('jobs')
    op.drop_table('history_events')
    op.drop_index('ix_tombstones_expired_at', table_name='tombstones')
    op.drop_table('tombstones')
    op.drop_index('ix_outbox_published_at', table_name='outbox', sqlite_where=sa.text("state = 'published'"), postgresql_where=sa.text("state = 'published'"))
    op.drop_index('ix_outbox_leased_until', table_name='outbox', sqlite_where=sa.text("state = 'leased'"), postgresql_where=sa.text("state = 'leased'"))
    op.drop_index('ix_outbox_available_at', table_name='outbox', sqlite_where=sa.text("state = 'waiting'"), postgresql_where=sa.text("state = 'waiting'"))
    op.drop_table('outbox')
    op.drop_table('notes')
    op.drop_index('ix_idempotency_keys_created_at', table_name='idempotency_keys')
    op.drop_table('idempotency_keys')
