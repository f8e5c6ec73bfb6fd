"""The tables. `migrations/` makes them; a test compares the two."""
from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import (
    BigInteger, CheckConstraint, Column, DateTime, Float, ForeignKey, Index, Integer, MetaData, PrimaryKeyConstraint,
    String, Table, Text, UniqueConstraint, literal_column, text,
)
from sqlalchemy.types import TypeDecorator

from app import states

REVISION = "0004"  # the migration that these tables are the outcome of

metadata = MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
})


class Moment(TypeDecorator[datetime]):
    """An aware UTC moment on both databases: SQLite stores it without a zone, so the zone is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(timezone.utc).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class Word(TypeDecorator[str]):
    """A word of a closed vocabulary. Where a column of them is compared, the word stands in the statement itself: a
    plan that is made for all values of a parameter cannot use an index that holds the rows of one word."""

    impl = String
    cache_ok = True

    class Comparator(TypeDecorator.Comparator[str]):
        """Writes words out."""

        def operate(self, op: Any, *other: Any, **more: Any) -> Any:
            return super().operate(op, *map(_written_out, other), **more)

    comparator_factory = Comparator


def _written_out(value: Any) -> Any:
    if isinstance(value, str) and value.isidentifier():
        return literal_column(f"'{value}'", Word())
    return [_written_out(each) for each in value] if isinstance(value, list | tuple) else value


def guard(column: Column[str], word: str) -> Any:
    """That a row which its key finds is in this state, said so that no index of the rows in that state finds it:
    PostgreSQL would take the smallest, and of an index that rows come to and leave all the time most may be left-overs.
    """
    return column.concat(literal_column("''")) == word


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


def _partial(name: str, *columns: Any, where: str, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


# A note that a client left. It stays whatever becomes of its history job.
notes = Table(
    "notes", metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("owner", String(255), nullable=False),
    Column("text", Text, nullable=False),
    Column("created_at", Moment, nullable=False),
    CheckConstraint("length(text) BETWEEN 1 AND 10000", name="text_length"),
    Index("ix_notes_owner_id", "owner", "id"),
    sqlite_autoincrement=True,
)

# What a client submitted: the contract's job, in four statuses. `version` counts every change that a client can see,
# so that a late write to the view never covers a later one. `published_at` is that of its first
# message: when the job starts, consumption has moved past everything that was published clearly before it. A job that
# runs with `cancel_requested_at` has no other end than `cancelled`.
jobs = Table(
    "jobs", metadata,
    Column("id", String(36), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("kind", String(255), nullable=False),
    Column("queue", String(255), nullable=False),
    Column("status", Word(16), nullable=False),
    Column("version", Integer, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False),
    Column("time_limit_seconds", Float, nullable=False),
    Column("input", Text, nullable=False),
    Column("result", Text),
    Column("error_code", String(16)),
    Column("error_message", Text),
    Column("progress_done", BigInteger),
    Column("progress_total", BigInteger),
    Column("note_id", Integer, ForeignKey("notes.id")),
    Column("callback_url", Text),
    Column("worker", String(255)),
    Column("lease_until", Moment),
    Column("cancel_requested_at", Moment),
    Column("published_at", Moment),
    Column("created_at", Moment, nullable=False),
    Column("started_at", Moment),
    Column("finished_at", Moment),
    Column("expires_at", Moment),
    CheckConstraint(_one_of("status", states.JOB_STATUSES), name="status"),
    CheckConstraint(_one_of("error_code", states.ERROR_CODES), name="error_code"),
    CheckConstraint("attempt BETWEEN 0 AND max_attempts", name="attempt"),
    CheckConstraint("(status = 'running') = (lease_until IS NOT NULL)", name="running_has_lease"),
    CheckConstraint("(status = 'succeeded') = (result IS NOT NULL)", name="succeeded_has_result"),
    CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name="failed_has_error"),
    CheckConstraint(
        "(status IN ('succeeded', 'failed')) = (finished_at IS NOT NULL AND expires_at IS NOT NULL)",
        name="final_has_end",
    ),
    _partial("ix_jobs_lease_until", "lease_until", where="status = 'running'"),
    _partial("ix_jobs_unfinished", "created_at", where="status IN ('queued', 'running')"),
    _partial("ix_jobs_expires_at", "expires_at", where="expires_at IS NOT NULL"),
    _partial("ix_jobs_queued", "queue", "created_at", where="status = 'queued'"),  # the place in the queue
    _partial(  # how long it took lately; what was cancelled before it ran says nothing
        "ix_jobs_kind_finished_at", "kind", "finished_at", where="finished_at IS NOT NULL AND started_at IS NOT NULL"),
    Index("ix_jobs_owner_id", "owner", "id"),  # the lists: an id sorts by creation
    Index("ix_jobs_owner_status_id", "owner", "status", "id"),
    Index("ix_jobs_owner_kind_id", "owner", "kind", "id"),
    _partial("ix_jobs_queue_started_at", "queue", "started_at", where="started_at IS NOT NULL"),
)

# What a job did to its note: exactly one `created` each, whatever was run twice.
history_events = Table(
    "history_events", metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("note_id", Integer, ForeignKey("notes.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("job_id", String(36), nullable=False),  # no foreign key: the event outlives its job
    Column("at", Moment, nullable=False),
    CheckConstraint(_one_of("kind", ("created",)), name="kind"),
    UniqueConstraint("note_id", "kind"),
    sqlite_autoincrement=True,
)

# What is to be published: written in the transaction that makes it necessary, published by the relay alone, gone when
# its message is claimed. `lease` names one claim of one relay; `failures` counts refusals that were the row's fault.
# Rows of one queue, time limit and value of `together` may share a message.
outbox = Table(
    "outbox", metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("task", Word(32), nullable=False),
    Column("target_id", String(64), nullable=False),
    Column("queue", String(255), nullable=False),
    Column("time_limit_seconds", Float),
    Column("state", Word(16), nullable=False),
    Column("available_at", Moment, nullable=False),
    Column("lease", String(36)),
    Column("leased_until", Moment),
    Column("published_at", Moment),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("last_error", Text),
    Column("created_at", Moment, nullable=False),
    Column("together", String(64)),
    CheckConstraint(_one_of("state", states.OUTBOX_STATES), name="state"),
    CheckConstraint(_one_of("task", states.OUTBOX_TASKS), name="task"),
    CheckConstraint("(state = 'leased') = (lease IS NOT NULL AND leased_until IS NOT NULL)", name="leased_has_lease"),
    UniqueConstraint("task", "target_id"),
    _partial("ix_outbox_available_at", "available_at", "id", where="state = 'waiting'"),
    _partial("ix_outbox_leased_until", "leased_until", where="state = 'leased'"),
    _partial("ix_outbox_parked", "id", where="state = 'parked'"),  # how many there are, beside a deep backlog
    _partial("ix_outbox_published_at", "queue", "published_at", where="state = 'published'"),
    sqlite_autoincrement=True,
)

# One callback of one job. `attempts` and `leased_until` are the fence of a sender, as `attempt` is that of a worker.
deliveries = Table(
    "deliveries", metadata,
    Column("id", String(64), primary_key=True),  # the webhook-id
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("url", Text, nullable=False),
    Column("host", String(300), nullable=False),
    Column("endpoint", String(64), nullable=False, server_default=""),
    Column("state", Word(16), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_attempt_at", Moment),
    Column("leased_until", Moment),
    Column("last_response", Integer),
    Column("created_at", Moment, nullable=False),
    Column("finished_at", Moment),
    CheckConstraint(_one_of("state", states.DELIVERY_STATES), name="state"),
    CheckConstraint("(state = 'pending') = (next_attempt_at IS NOT NULL)", name="pending_is_due"),
    CheckConstraint("(state = 'sending') = (leased_until IS NOT NULL)", name="sending_has_lease"),
    _partial("ix_deliveries_sending_host", "host", where="state = 'sending'"),
    _partial("ix_deliveries_pending_host", "host", "next_attempt_at", where="state = 'pending'"),
    _partial("ix_deliveries_next_attempt_at", "next_attempt_at", where="state = 'pending'"),
    _partial("ix_deliveries_leased_until", "leased_until", where="state = 'sending'"),
    Index("ix_deliveries_job_id", "job_id"),
    _partial("ix_deliveries_pending_endpoint", "endpoint", "next_attempt_at", where="state = 'pending'"),
)

# How the callbacks to one URL (without its query) went lately; `id` is its SHA-256, since URLs are too long for an
# index. `failures` counts failed attempts in a row, since `failing_since`; until `paused_until` there is no attempt.
# `noted_at`: when any of it last changed.
endpoints = Table(
    "endpoints", metadata,
    Column("id", String(64), primary_key=True),
    Column("host", String(300), nullable=False),
    Column("standing", Word(16), nullable=False),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("failing_since", Moment),
    Column("paused_until", Moment),
    Column("noted_at", Moment, nullable=False),
    CheckConstraint(_one_of("standing", states.STANDINGS), name="standing"),
    CheckConstraint("(standing = 'failing') = (failing_since IS NOT NULL)", name="failing_has_begun"),
    CheckConstraint("paused_until IS NULL OR standing = 'failing'", name="paused_is_failing"),
    _partial("ix_endpoints_failing", "paused_until", where="standing = 'failing'"),
    Index("ix_endpoints_noted_at", "noted_at"),
    Index("ix_endpoints_host_noted_at", "host", "noted_at"),
)

# One try of one delivery, append only.
delivery_attempts = Table(
    "delivery_attempts", metadata,
    Column("delivery_id", String(64), ForeignKey("deliveries.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", Moment, nullable=False),
    Column("response_code", Integer),
    Column("error", Text),
    Column("duration_seconds", Float, nullable=False),
    Column("excerpt", Text),
    PrimaryKeyConstraint("delivery_id", "attempt"),
)

# The first answer to a keyed submission, in the same transaction as its job.
idempotency_keys = Table(
    "idempotency_keys", metadata,
    Column("owner", String(255), nullable=False),
    Column("key", String(255), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("job_id", String(36), nullable=False),  # no foreign key: the key may outlive its job
    Column("note_id", Integer),
    Column("body", Text, nullable=False),
    Column("created_at", Moment, nullable=False),
    PrimaryKeyConstraint("owner", "key"),
    Index("ix_idempotency_keys_created_at", "created_at"),
)

# What is left of a job after its time to live: enough to answer 410, never its input or result.
tombstones = Table(
    "tombstones", metadata,
    Column("job_id", String(36), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("kind", String(255), nullable=False),
    Column("status", Word(16), nullable=False),
    Column("finished_at", Moment, nullable=False),
    Column("expired_at", Moment, nullable=False),
    CheckConstraint(_one_of("status", (states.SUCCEEDED, states.FAILED)), name="status"),
    Index("ix_tombstones_expired_at", "expired_at"),
)
