"""What must always hold between the rows, as questions to the database: each finds the rows that break it. What a
living installation mends by itself has as much time as that takes before it counts."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, and_, exists, func, literal, not_, or_, select

from app import deliveries as delivery
from app import jobs as job
from app import outbox as message
from app import states
from app.config import settings
from app.schema import deliveries, history_events, idempotency_keys, jobs, notes, outbox, tombstones

MOST = 1000  # rows that one question names
# What the relay, the rescue and the pruning take at most, when they run.
_UNPUBLISHED_SECONDS = 30.0
_UNRESCUED_SECONDS = 30.0
_UNPRUNED_SECONDS = 300.0

_Ids = Any  # a Select of two columns: an id, and what was found there
Mend = Callable[[Connection, str, datetime], None]


@dataclass(frozen=True)
class Invariant:
    """`broken(now)` selects the ids that break it, and a detail each; `mend` repairs one of them, where that is safe.

    `otherwise` is what a person does about it.
    """

    name: str
    broken: Callable[[datetime], _Ids]
    otherwise: str
    mend: Mend | None = None


def _unfinished() -> Any:
    return jobs.c.status.in_((states.QUEUED, states.RUNNING))


def _row_of(task: str, target: Any) -> Any:
    return exists().where(outbox.c.task == task, outbox.c.target_id == target)


def _ago(now: datetime, *seconds: float) -> datetime:
    return now - timedelta(seconds=sum(seconds))


def _queued_without_row(now: datetime) -> _Ids:
    return select(jobs.c.id, jobs.c.created_at).where(
        jobs.c.status == states.QUEUED, not_(_row_of(states.RUN_JOB, jobs.c.id)))


def _stage_job(tx: Connection, job_id: str, now: datetime) -> None:
    queued = job.find(tx, job_id)
    if queued is not None and queued.status == states.QUEUED:
        message.stage(tx, states.RUN_JOB, job_id, queued.queue, now, time_limit_seconds=queued.time_limit_seconds)


def _lease_is_over(now: datetime) -> _Ids:
    return select(jobs.c.id, jobs.c.lease_until).where(
        jobs.c.status == states.RUNNING,
        jobs.c.lease_until < _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS))


def _final_without_delivery(now: datetime) -> _Ids:
    return select(jobs.c.id, jobs.c.finished_at).where(
        not_(_unfinished()), jobs.c.callback_url.is_not(None), ~exists().where(deliveries.c.job_id == jobs.c.id))


def _add_delivery(tx: Connection, job_id: str, now: datetime) -> None:
    final = job.find(tx, job_id)
    if final is not None and delivery.latest_of_job(tx, job_id) is None:
        delivery.add(tx, final, now, now)


def _delivery_before_the_end(now: datetime) -> _Ids:
    return select(deliveries.c.id, jobs.c.status).join(jobs, jobs.c.id == deliveries.c.job_id).where(_unfinished())


_other = deliveries.alias("other")


def _pending_without_row(now: datetime) -> _Ids:
    """A delivery that is due waits without a row while others to its host are under way, and only then."""
    host_is_busy = exists().where(_other.c.host == deliveries.c.host, _other.c.state == states.SENDING)
    overlooked = and_(deliveries.c.next_attempt_at < _ago(now, _UNRESCUED_SECONDS), ~host_is_busy)
    return select(deliveries.c.id, deliveries.c.next_attempt_at).where(
        deliveries.c.state == states.PENDING, not_(_row_of(states.DELIVER_WEBHOOK, deliveries.c.id)),
        or_(deliveries.c.next_attempt_at > now, overlooked))


def _stage_delivery(tx: Connection, delivery_id: str, now: datetime) -> None:
    delivery.restage(tx, delivery_id, now, now)


def _sending_lease_is_over(now: datetime) -> _Ids:
    return select(deliveries.c.id, deliveries.c.leased_until).where(
        deliveries.c.state == states.SENDING,
        deliveries.c.leased_until < _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS))


def _parked(now: datetime) -> _Ids:
    return select(outbox.c.target_id, outbox.c.last_error).where(outbox.c.state == states.PARKED)


def _unpublished(now: datetime) -> _Ids:
    before = _ago(now, settings().relay_interval_seconds, _UNPUBLISHED_SECONDS)
    return select(outbox.c.target_id, outbox.c.state).where(or_(
        and_(outbox.c.state == states.WAITING, outbox.c.available_at < before),
        and_(outbox.c.state == states.LEASED, outbox.c.leased_until < before)))


def _overtaken(now: datetime) -> _Ids:
    """Messages published after it were claimed long ago, so it is lost, and nobody has published it again."""
    before = _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS)
    reached = select(jobs.c.queue, func.max(jobs.c.published_at).label("published_at")).where(
        jobs.c.started_at.between(_ago(before, 3600), before)).group_by(jobs.c.queue).subquery()
    return select(outbox.c.target_id, outbox.c.published_at).join(reached, reached.c.queue == outbox.c.queue).where(
        outbox.c.state == states.PUBLISHED, outbox.c.published_at < reached.c.published_at,
        outbox.c.published_at < before)


def _needless_row(now: datetime) -> _Ids:
    queued = exists().where(jobs.c.id == outbox.c.target_id, jobs.c.status == states.QUEUED)
    pending = exists().where(deliveries.c.id == outbox.c.target_id, deliveries.c.state == states.PENDING)
    return select(outbox.c.target_id, outbox.c.task).where(or_(
        and_(outbox.c.task == states.RUN_JOB, ~queued), and_(outbox.c.task == states.DELIVER_WEBHOOK, ~pending)))


def _remove_row(tx: Connection, target_id: str, now: datetime) -> None:
    message.remove(tx, target_id)


def _history_without_event(now: datetime) -> _Ids:
    told = select(history_events.c.note_id)
    return select(jobs.c.id, jobs.c.note_id).where(
        jobs.c.kind == "history", jobs.c.status == states.SUCCEEDED, jobs.c.note_id.not_in(told))


def _event_without_success(now: datetime) -> _Ids:
    return select(history_events.c.job_id, jobs.c.status).join(jobs, jobs.c.id == history_events.c.job_id).where(
        jobs.c.status != states.SUCCEEDED)


def _second_event(now: datetime) -> _Ids:
    return select(func.min(history_events.c.job_id), func.count()).group_by(
        history_events.c.note_id).having(func.count() > 1)


def _note_without_job(now: datetime) -> _Ids:
    told = select(history_events.c.note_id)
    worked = select(jobs.c.note_id).where(jobs.c.note_id.is_not(None))
    return select(notes.c.id, notes.c.created_at).where(
        notes.c.created_at > _ago(now, settings().result_ttl_seconds), notes.c.id.not_in(told),
        notes.c.id.not_in(worked))


def _key_without_job(now: datetime) -> _Ids:
    known = or_(exists().where(jobs.c.id == idempotency_keys.c.job_id),
                exists().where(tombstones.c.job_id == idempotency_keys.c.job_id))
    kept = _ago(now, settings().result_ttl_seconds, settings().tombstone_ttl_seconds)
    return select(idempotency_keys.c.job_id, literal("an idempotency key names it")).where(
        idempotency_keys.c.created_at > kept, ~known)


def _unpruned(now: datetime) -> _Ids:
    telling = exists().where(
        deliveries.c.job_id == jobs.c.id, deliveries.c.state.in_(sorted(states.UNFINISHED_DELIVERIES)))
    return select(jobs.c.id, jobs.c.expires_at).where(
        jobs.c.expires_at < _ago(now, settings().prune_interval_seconds, _UNPRUNED_SECONDS), ~telling)


_CLOCK = "does a courier run, and a beat?"
_PERSON = "a person must look: this must not happen"

INVARIANTS = (
    Invariant("a queued job has an outbox row", _queued_without_row, "--fix stages one", _stage_job),
    Invariant("a running job has a living lease", _lease_is_over, _CLOCK),
    Invariant("a final job with a callback has a delivery", _final_without_delivery, "--fix adds it", _add_delivery),
    Invariant("a delivery follows the end of its job", _delivery_before_the_end, _PERSON),
    Invariant("a delivery that waits has an outbox row", _pending_without_row, "--fix stages one", _stage_delivery),
    Invariant("a delivery being made has a living lease", _sending_lease_is_over, _CLOCK),
    Invariant("no outbox row is parked", _parked, "mend its cause; then --fix stages it anew", message.unpark),
    Invariant("an outbox row that is due is published", _unpublished, _CLOCK),
    Invariant("a message that was overtaken is published again", _overtaken, _CLOCK),
    Invariant("an outbox row has something to do", _needless_row, "--fix removes it", _remove_row),
    Invariant("a history that succeeded has its event", _history_without_event, _PERSON),
    Invariant("an event belongs to a history that succeeded", _event_without_success, _PERSON),
    Invariant("a note has one event", _second_event, _PERSON),
    Invariant("a note has its job", _note_without_job, _PERSON),
    Invariant("an idempotency key names a job that was", _key_without_job, _PERSON),
    Invariant("an expired job is pruned", _unpruned, _CLOCK),
)
