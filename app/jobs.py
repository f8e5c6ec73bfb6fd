"""Jobs: the row, the document that clients read, and every move. Each move is one guarded statement: it returns the
row as it is afterwards, or None when it did not win."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from app import outbox, statements, states
from app.clock import isoformat, now as the_present
from app.schema import Moment, guard, jobs
from app.schema import outbox as messages

MAX_MESSAGE_LENGTH = 1000


@dataclass(frozen=True)
class Job:
    """A row of `jobs`."""

    id: str
    owner: str
    kind: str
    queue: str
    status: str
    version: int
    attempt: int
    max_attempts: int
    time_limit_seconds: float
    input: str  # JSON
    result: str | None  # JSON
    error_code: str | None
    error_message: str | None
    progress_done: int | None
    progress_total: int | None
    note_id: int | None
    callback_url: str | None
    worker: str | None
    lease_until: datetime | None
    cancel_requested_at: datetime | None
    published_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    as_of: datetime = field(default_factory=the_present, compare=False)  # when the row was read; not a column

    @property
    def final(self) -> bool:
        return self.status in states.FINAL


columns = [jobs.c[column.name] for column in fields(Job) if column.name != "as_of"]


def _job(row: Any) -> Job | None:
    return None if row is None else Job(*row)


def as_document(job: Job) -> dict[str, Any]:
    """The job as clients read it (without `callback`): a key is there only when it has meaning."""
    document: dict[str, Any] = {
        "job_id": job.id, "kind": job.kind, "status": job.status, "attempt": job.attempt,
        "created_at": isoformat(job.created_at),
    }
    for name in ("started_at", "finished_at", "expires_at"):
        if (moment := getattr(job, name)) is not None:
            document[name] = isoformat(moment)
    if job.note_id is not None:
        document["note_id"] = job.note_id
    if job.status == states.RUNNING and job.progress_done is not None:
        document["progress"] = {"done": job.progress_done, "total": job.progress_total}
    if job.status == states.SUCCEEDED:
        document["result"] = json.loads(job.result or "null")
    if job.status == states.FAILED:
        document["error"] = {"code": job.error_code, "message": job.error_message}
    return document


def path(job_id: str) -> str:
    """Where a job is polled, relative to the service."""
    return f"/jobs/{job_id}"


# --- reading ---

_find = select(*columns).where(jobs.c.id == bindparam("job_id"))
_held_by = select(*columns).where(
    jobs.c.status == states.RUNNING, jobs.c.worker.in_(bindparam("by", expanding=True)))
_oldest_unfinished = select(func.min(jobs.c.created_at)).where(jobs.c.status.in_([states.QUEUED, states.RUNNING]))
_last_started = (
    select(jobs.c.started_at, jobs.c.published_at)
    .where(jobs.c.queue == bindparam("in_queue"), jobs.c.started_at.is_not(None))
    .order_by(jobs.c.started_at.desc()).limit(1))


def find(view: Connection, job_id: str) -> Job | None:
    """The job with this id, whatever its age; None when there is none."""
    return _job(statements.first(view, _find, {"job_id": job_id}))


def held_by(view: Connection, *workers: str) -> list[Job]:
    """The jobs that these workers are running."""
    return [Job(*row) for row in view.execute(_held_by, {"by": workers})]


def oldest_unfinished(view: Connection) -> datetime | None:
    """When the oldest job that is not final was submitted."""
    return view.execute(_oldest_unfinished).scalar_one()


def last_started(view: Connection, queue: str) -> tuple[datetime, datetime | None] | None:
    """When the latest attempt of this queue started, and when the message that led to it had been published."""
    row = view.execute(_last_started, {"in_queue": queue}).first()
    return None if row is None else (row.started_at, row.published_at)


# --- moves ---

_new = [
    jobs.c[name] for name in (
        "id", "owner", "kind", "queue", "status", "max_attempts", "time_limit_seconds", "input", "note_id",
        "callback_url", "created_at")]
_submit = statements.inserts(jobs, _new)


def submitting(tx: Connection, new: Sequence[Job]) -> statements.Asked:
    """(none) → queued: what keeps new jobs, one at least."""
    return statements.of_all(tx, _submit, [
        {column.name: getattr(job, column.name) for column in _new} for job in new])


def _move(*guards: Any) -> Any:
    return update(jobs).where(*guards).values(version=jobs.c.version + 1).returning(*columns)


_held = (jobs.c.id == bindparam("job_id"), jobs.c.attempt == bindparam("held"), guard(jobs.c.status, states.RUNNING))

_hold = _find.with_for_update(key_share=True)


def hold(tx: Connection, job_id: str) -> Job | None:
    """The job with this id; until the transaction ends nobody else moves it. Held before its outbox row by all who
    touch both, so that two never wait for each other."""
    return _job(statements.first(tx, _hold, {"job_id": job_id}))


_these = select(jobs.c.id).where(jobs.c.id.in_(bindparam("ids", expanding=True)))
_hold_these_if_free = _these.with_for_update(key_share=True, skip_locked=True)


def moving(tx: Connection, job_ids: Sequence[str]) -> set[str]:
    """Those of these jobs that somebody moves at this moment. Until the transaction ends nobody moves the others. For
    who holds their outbox rows already, and so must not wait for a job."""
    held = set(tx.execute(_hold_these_if_free, {"ids": list(job_ids)}).scalars())
    return set(tx.execute(_these, {"ids": list(job_ids)}).scalars()) - held


_start = _move(jobs.c.id == bindparam("job_id"), guard(jobs.c.status, states.QUEUED)).values(
    status=states.RUNNING, attempt=jobs.c.attempt + 1, worker=bindparam("by"), started_at=bindparam("now"),
    lease_until=bindparam("until"), progress_done=None, progress_total=None,
    published_at=func.coalesce(jobs.c.published_at, bindparam("published", type_=Moment())))


def start(
    tx: Connection, job_id: str, worker: str, now: datetime, lease_until: datetime, published_at: datetime | None,
) -> Job | None:
    """queued → running: claims the next attempt for this worker until the lease ends.

    `published_at` is when the message that led here was published, when that is known. A job keeps the first: which of
    several messages led here nobody knows, and the oldest never says that consumption is further than it is.
    """
    return _job(statements.first(tx, _start, {
        "job_id": job_id, "by": worker, "now": now, "until": lease_until, "published": published_at}))


_by_message = select(func.coalesce(messages.c.published_at, messages.c.available_at)).where(
    messages.c.task == states.RUN_JOB, messages.c.target_id == bindparam("job_id")).scalar_subquery()
_free = jobs.alias()
_if_free = jobs.c.id == select(_free.c.id).where(_free.c.id == bindparam("job_id")).with_for_update(
    key_share=True, skip_locked=True).scalar_subquery()


def _by_message_that(start: Any) -> dict[str, Any]:
    start = start.where(_if_free).values(published_at=func.coalesce(jobs.c.published_at, _by_message))
    started = start.cte("started")
    settled = outbox.settling(states.RUN_JOB, select(started.c.id)).cte("settled")
    return {"sqlite": start, "postgresql": select(*started.c).add_cte(settled)}


_start_by_message = _by_message_that(_start)
_start_first_by_message = _by_message_that(_start.where(jobs.c.attempt == 0))


def start_by_message(
    tx: Connection, job_id: str, worker: str, now: datetime, lease_until: datetime, first: bool = False,
) -> Job | None:
    """As `start`, by the message whose outbox row is still there, and is settled. Waits for nobody who moves the job at
    this moment. `first`: only the first attempt."""
    return _settled(tx, statements.first(tx, *_starting(tx, job_id, worker, now, lease_until, first)))


def _starting(
    tx: Connection, job_id: str, worker: str, now: datetime, lease_until: datetime, first: bool,
) -> statements.Asked:
    variants = _start_first_by_message if first else _start_by_message
    return variants[tx.dialect.name], {"job_id": job_id, "by": worker, "now": now, "until": lease_until}


def _settled(tx: Connection, row: Any) -> Job | None:
    if row is not None and tx.dialect.name == "sqlite":  # on PostgreSQL one statement has done both
        outbox.settle(tx, states.RUN_JOB, row[0])
    return _job(row)


_note_published = update(jobs).where(jobs.c.id == bindparam("job_id"), jobs.c.published_at.is_(None)).values(
    published_at=bindparam("published"))


def note_published(tx: Connection, job_id: str, published_at: datetime) -> None:
    """Keeps when a job's first message was published, before another one is. Clients see nothing of it."""
    note_all_published(tx, {job_id: published_at})


def note_all_published(tx: Connection, moments: Mapping[str, datetime]) -> int:
    """As `note_published`, of several, and one at least; returns for how many nobody had kept it yet."""
    return statements.changed_by_all(tx, _note_published, [
        {"job_id": job_id, "published": published_at} for job_id, published_at in moments.items()])


_extend = update(jobs).where(*_held).values(
    lease_until=bindparam("until"), progress_done=bindparam("done"), progress_total=bindparam("total")
).returning(*columns)


def extend_lease(tx: Connection, held: Job, lease_until: datetime, done: int | None, total: int | None) -> Job | None:
    """The heartbeat of a running attempt, with its progress. None when the attempt is lost."""
    return _job(statements.first(tx, _extend, {
        "job_id": held.id, "held": held.attempt, "until": lease_until, "done": done, "total": total}))


_wanted = (*_held, jobs.c.cancel_requested_at.is_(None))
ENDED: dict[str, Any] = {
    "lease_until": None, "progress_done": None, "progress_total": None, "finished_at": bindparam("now"),
    "expires_at": bindparam("expires")}
_failed = {"status": states.FAILED, "error_code": bindparam("code"), "error_message": bindparam("message"), **ENDED}
_succeed = _move(*_wanted).values(status=states.SUCCEEDED, result=bindparam("outcome"), **ENDED)
_fail = _move(*_wanted).values(**_failed)


def succeed(tx: Connection, held: Job, result: str, now: datetime, ttl: timedelta) -> Job | None:
    """running → succeeded, with the result as JSON text."""
    return _job(statements.first(tx, *_succeeding(held, result, now, ttl)))


def _succeeding(held: Job, result: str, now: datetime, ttl: timedelta) -> statements.Asked:
    return _succeed, {"job_id": held.id, "held": held.attempt, "outcome": result, "now": now, "expires": now + ttl}


def succeed_and_start(
    tx: Connection, held: Job, result: str, ended_at: datetime, ttl: timedelta, next_id: str, worker: str,
    now: datetime, lease_until: datetime,
) -> tuple[Job | None, Job | None]:
    """As `succeed`, and as `start_by_message` the first attempt of another job, each whether the other one wins or not;
    the last of this transaction."""
    ended, started = statements.together(
        tx, _succeeding(held, result, ended_at, ttl), _starting(tx, next_id, worker, now, lease_until, first=True),
        last=True)
    return _job(next(iter(ended), None)), _settled(tx, next(iter(started), None))


def fail(tx: Connection, held: Job, code: str, message: str, now: datetime, ttl: timedelta) -> Job | None:
    """running → failed, for good."""
    return _job(statements.first(tx, _fail, {
        "job_id": held.id, "held": held.attempt, "code": code, "message": storable(message),
        "now": now, "expires": now + ttl}))


_requeue = _move(*_wanted).values(status=states.QUEUED, lease_until=None, progress_done=None, progress_total=None)


def requeue(tx: Connection, held: Job) -> Job | None:
    """running → queued: this attempt is over, another one follows. The caller stages its message."""
    return _job(statements.first(tx, _requeue, {"job_id": held.id, "held": held.attempt}))


_release = _requeue.values(max_attempts=jobs.c.max_attempts + 1)


def release(tx: Connection, held: Job) -> Job | None:
    """running → queued: the worker had to stop. As `requeue`, but the attempt is not held against the job."""
    return _job(statements.first(tx, _release, {"job_id": held.id, "held": held.attempt}))


# --- cancellation: a job that is queued ends at once; one that runs has no other end from then on ---

_cancelled: dict[str, Any] = {"code": states.CANCELLED, "message": "cancelled on request"}
_keep = _find.with_for_update(read=True, key_share=True)
_cancel = _move(jobs.c.id == bindparam("job_id"), guard(jobs.c.status, states.QUEUED)).values(**_failed)
_request_cancel = update(jobs).where(jobs.c.id == bindparam("job_id"), guard(jobs.c.status, states.RUNNING)).values(
    cancel_requested_at=func.coalesce(jobs.c.cancel_requested_at, bindparam("now", type_=Moment()))
).returning(*columns)
_end_cancelled = _move(*_held, jobs.c.cancel_requested_at.is_not(None)).values(**_failed)
_cancel_requested = select(jobs.c.cancel_requested_at).where(*_held)


def keep(tx: Connection, job_id: str) -> Job | None:
    """The job with this id; until the transaction ends it is not pruned."""
    return _job(statements.first(tx, _keep, {"job_id": job_id}))


def cancel(tx: Connection, job_id: str, now: datetime, ttl: timedelta) -> Job | None:
    """queued → failed with `cancelled`. The caller settles its outbox row."""
    return _job(statements.first(tx, _cancel, {"job_id": job_id, "now": now, "expires": now + ttl, **_cancelled}))


def request_cancel(tx: Connection, job_id: str, now: datetime) -> Job | None:
    """Asks the running attempt to stop. No move: whoever ends the attempt from now on ends it with `end_cancelled`."""
    return _job(statements.first(tx, _request_cancel, {"job_id": job_id, "now": now}))


def end_cancelled(tx: Connection, held: Job, now: datetime, ttl: timedelta) -> Job | None:
    """running → failed with `cancelled`, when that was asked for; every other end is refused then."""
    return _job(statements.first(tx, _end_cancelled, {
        "job_id": held.id, "held": held.attempt, "now": now, "expires": now + ttl, **_cancelled}))


def cancel_requested(view: Connection, held: Job) -> bool:
    """Whether this running attempt has been asked to stop."""
    return statements.first(view, _cancel_requested, {"job_id": held.id, "held": held.attempt}) not in (None, (None,))


_touch = _move(jobs.c.id == bindparam("job_id"))


def touch(tx: Connection, job_id: str) -> Job:
    """Counts a change that clients see beside the row itself (its callback's)."""
    return Job(*tx.execute(_touch, {"job_id": job_id}).one())


# One transaction ends so many attempts: a hundred take 20 ms, and the next look takes the next.
_stalled = select(*columns).where(
    jobs.c.status == states.RUNNING, jobs.c.lease_until < bindparam("now")).order_by(jobs.c.lease_until).limit(100)


def stalled(tx: Connection, now: datetime) -> list[Job]:
    """Running jobs whose lease is over: at most 100, the longest over first."""
    return [Job(*row) for row in tx.execute(_stalled.with_for_update(skip_locked=True), {"now": now})]


def storable(message: str) -> str:
    """A text that every database takes: without NUL and lone surrogates, at most MAX_MESSAGE_LENGTH characters."""
    clean = message.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\ufffd")
    return clean if len(clean) <= MAX_MESSAGE_LENGTH else clean[: MAX_MESSAGE_LENGTH - 1] + "…"
