"""What must always hold between the rows, as questions to the database: each finds the rows that break it. What a
living installation mends by itself has as much time as that takes before it counts."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, and_, exists, extract, func, literal, not_, or_, select

from app import deliveries as delivery
from app import jobs as job
from app import outbox as message
from app import states, turns
from app.config import settings
from app.schema import deliveries, delivery_attempts, history_events, idempotency_keys, jobs, notes, outbox, tombstones

MOST = 1000  # rows that one question names; a repair asks again until none is left
# What the relay, the rescue and the pruning take at most, when they run.
_UNPUBLISHED_SECONDS = 30.0
_UNRESCUED_SECONDS = 30.0
_UNPRUNED_SECONDS = 300.0
_UNKILLED_SECONDS = 60.0
_OVERTAKEN_SECONDS = 20.0  # earlier than others: relays side by side mark what they published out of order
_NEEDLESS_SECONDS = 120.0  # a repeated message may overtake a row while it is staged; the row's own settles it

_Ids = Any  # a Select of two columns: an id, and what was found there
Mend = Callable[[Connection, str, datetime], None]


@dataclass(frozen=True)
class Invariant:
    """`broken(now)` selects the ids that break it, and a detail each. `mend` repairs one, where that is safe: its
    caller holds the rows of that id, and has seen in them that it is broken. `otherwise` is what a person does."""

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
    assert queued is not None
    message.stage(tx, states.RUN_JOB, job_id, queued.queue, now, time_limit_seconds=queued.time_limit_seconds)


def _lease_is_over(now: datetime) -> _Ids:
    return select(jobs.c.id, jobs.c.lease_until).where(
        jobs.c.status == states.RUNNING, or_(
            jobs.c.lease_until < _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS),
            jobs.c.lease_until > now + timedelta(seconds=settings().lease_seconds + _UNRESCUED_SECONDS)))


def _beyond_its_limit(now: datetime) -> _Ids:
    """Its worker kills it then."""
    ends = extract("epoch", jobs.c.started_at) + jobs.c.time_limit_seconds
    return select(jobs.c.id, jobs.c.started_at).where(
        jobs.c.status == states.RUNNING, ends < _ago(now, _UNKILLED_SECONDS).timestamp())


def _not_ending(now: datetime) -> _Ids:
    """Its worker ends its function, or the rescue ends what its worker has left."""
    before = _ago(now, settings().cancel_grace_seconds, settings().lease_seconds, settings().rescue_interval_seconds,
                  _UNKILLED_SECONDS)
    return select(jobs.c.id, jobs.c.cancel_requested_at).where(
        jobs.c.status == states.RUNNING, jobs.c.cancel_requested_at < before)


def _final_without_delivery(now: datetime) -> _Ids:
    return select(jobs.c.id, jobs.c.finished_at).where(
        not_(_unfinished()), jobs.c.callback_url.is_not(None), ~exists().where(deliveries.c.job_id == jobs.c.id))


def _add_delivery(tx: Connection, job_id: str, now: datetime) -> None:
    final = job.find(tx, job_id)
    assert final is not None
    delivery.add(tx, final, now, now)


def _delivery_before_the_end(now: datetime) -> _Ids:
    return select(deliveries.c.id, jobs.c.status).join(jobs, jobs.c.id == deliveries.c.job_id).where(_unfinished())


_other = deliveries.alias("other")


def _pending_without_row(now: datetime) -> _Ids:
    """A delivery that is due waits without a row while another to its host is under way, or is about to be: the end of
    that one stages it. Nothing else does."""
    before = _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS)
    about_to_be = and_(_other.c.next_attempt_at <= now, _row_of(states.DELIVER_WEBHOOK, _other.c.id))
    busy = select(_other.c.host).distinct().where(or_(
        _other.c.state == states.SENDING, and_(_other.c.state == states.PENDING, about_to_be)))
    return select(deliveries.c.id, deliveries.c.next_attempt_at).where(
        deliveries.c.state == states.PENDING, not_(_row_of(states.DELIVER_WEBHOOK, deliveries.c.id)), or_(
            deliveries.c.next_attempt_at > now + timedelta(seconds=_UNRESCUED_SECONDS),  # not due by any clock
            and_(deliveries.c.next_attempt_at < before, deliveries.c.host.not_in(busy))))


def _stage_delivery(tx: Connection, delivery_id: str, now: datetime) -> None:
    pending = delivery.find(tx, delivery_id)
    assert pending is not None and pending.next_attempt_at is not None
    turns.stage(tx, delivery_id, max(pending.next_attempt_at, now), now)


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
    """Since long ago only messages that were published clearly later were claimed, so it is lost; and nobody has
    published it again."""
    before = _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS)
    queues = select(outbox.c.queue).where(outbox.c.state == states.PUBLISHED).distinct().subquery()
    last_start = select(func.max(jobs.c.started_at)).where(
        jobs.c.queue == queues.c.queue, jobs.c.started_at <= before).scalar_subquery()
    since = select(queues.c.queue, last_start.label("moment")).subquery()
    reached = select(jobs.c.queue, func.min(jobs.c.published_at).label("published_at")).join(since, and_(
        jobs.c.queue == since.c.queue, jobs.c.started_at >= since.c.moment)).group_by(jobs.c.queue).subquery()
    later_by = extract("epoch", reached.c.published_at) - extract("epoch", outbox.c.published_at)
    return select(outbox.c.target_id, outbox.c.published_at).join(reached, reached.c.queue == outbox.c.queue).where(
        outbox.c.state == states.PUBLISHED, outbox.c.published_at < before, later_by > _OVERTAKEN_SECONDS)


_requeued = outbox.alias("requeued")


def _unclaimed(now: datetime) -> _Ids:
    """Nobody does anything of its sort, and has not for long: it is lost, or nobody is there to claim it."""
    before = _ago(now, settings().rescue_interval_seconds, _UNRESCUED_SECONDS)
    running = exists().where(or_(
        jobs.c.status == states.RUNNING, jobs.c.started_at >= before, jobs.c.finished_at >= before))
    ended = exists().where(_requeued.c.target_id == jobs.c.id, _requeued.c.created_at >= before, jobs.c.attempt > 0)
    sending = or_(exists().where(deliveries.c.state == states.SENDING),
                  exists().where(delivery_attempts.c.at >= before))
    return select(outbox.c.target_id, outbox.c.published_at).where(
        outbox.c.state == states.PUBLISHED, outbox.c.published_at < before, or_(
            and_(outbox.c.task == states.RUN_JOB, ~running, ~ended),
            and_(outbox.c.task == states.DELIVER_WEBHOOK, ~sending)))


def _needless_row(now: datetime) -> _Ids:
    queued = exists().where(jobs.c.id == outbox.c.target_id, jobs.c.status == states.QUEUED)
    pending = exists().where(deliveries.c.id == outbox.c.target_id, deliveries.c.state == states.PENDING)
    return select(outbox.c.target_id, outbox.c.task).where(
        outbox.c.created_at < _ago(now, _NEEDLESS_SECONDS), or_(
            and_(outbox.c.task == states.RUN_JOB, ~queued), and_(outbox.c.task == states.DELIVER_WEBHOOK, ~pending)))


def _remove_row(tx: Connection, target_id: str, now: datetime) -> None:
    for task in states.OUTBOX_TASKS:
        message.settle(tx, task, target_id)


def _history_without_event(now: datetime) -> _Ids:
    told = exists().where(history_events.c.note_id == jobs.c.note_id, history_events.c.job_id == jobs.c.id)
    return select(jobs.c.id, jobs.c.note_id).where(
        jobs.c.kind == "history", jobs.c.status == states.SUCCEEDED, ~told)


def _event_without_success(now: datetime) -> _Ids:
    return select(history_events.c.job_id, jobs.c.status).join(jobs, jobs.c.id == history_events.c.job_id).where(
        jobs.c.status != states.SUCCEEDED)


def _second_event(now: datetime) -> _Ids:
    return select(history_events.c.note_id, func.count()).group_by(history_events.c.note_id).having(func.count() > 1)


def _note_without_job(now: datetime) -> _Ids:
    """A history that failed leaves no event, but its job is kept for its time to live."""
    told = exists().where(history_events.c.note_id == notes.c.id)
    return select(notes.c.id, notes.c.created_at).outerjoin(jobs, jobs.c.note_id == notes.c.id).where(
        notes.c.created_at > _ago(now, settings().result_ttl_seconds), jobs.c.id.is_(None), ~told)


def _key_without_job(now: datetime) -> _Ids:
    known = or_(exists().where(jobs.c.id == idempotency_keys.c.job_id),
                exists().where(tombstones.c.job_id == idempotency_keys.c.job_id))
    kept = _ago(now, settings().result_ttl_seconds, settings().tombstone_ttl_seconds)
    return select(idempotency_keys.c.job_id, literal("an idempotency key names it")).where(
        idempotency_keys.c.created_at > kept, ~known)


def _pruned_before(now: datetime) -> datetime:
    return _ago(now, settings().prune_interval_seconds, _UNPRUNED_SECONDS)


def _unpruned(now: datetime) -> _Ids:
    """A job whose callback ends after the job's own time to live is pruned then, or when it need not be kept to be
    asked for again."""
    kept_since = _ago(_pruned_before(now), settings().result_ttl_seconds)
    telling = exists().where(deliveries.c.job_id == jobs.c.id, or_(
        deliveries.c.state.in_(sorted(states.UNFINISHED_DELIVERIES)), deliveries.c.finished_at >= _pruned_before(now),
        and_(deliveries.c.state == states.EXHAUSTED, deliveries.c.finished_at >= kept_since)))
    return select(jobs.c.id, jobs.c.expires_at).where(jobs.c.expires_at < _pruned_before(now), ~telling)


def _old_tombstone(now: datetime) -> _Ids:
    before = _ago(_pruned_before(now), settings().tombstone_ttl_seconds)
    return select(tombstones.c.job_id, tombstones.c.expired_at).where(tombstones.c.expired_at < before)


def _old_key(now: datetime) -> _Ids:
    """A key outlives its time while its job can be read."""
    readable = exists().where(jobs.c.id == idempotency_keys.c.job_id)
    buried_now = exists().where(
        tombstones.c.job_id == idempotency_keys.c.job_id, tombstones.c.expired_at >= _pruned_before(now))
    before = _ago(_pruned_before(now), settings().idempotency_ttl_seconds)
    return select(idempotency_keys.c.job_id, idempotency_keys.c.created_at).where(
        idempotency_keys.c.created_at < before, ~readable, ~buried_now)


_CLOCK = "does a courier run, and a beat?"
_CONSUMER = "does a worker run for its queue, and a courier?"
_PERSON = "a person must look: this must not happen"

INVARIANTS = (
    Invariant("a queued job has an outbox row", _queued_without_row, "--fix stages one", _stage_job),
    Invariant("a running job has a living lease", _lease_is_over, _CLOCK),
    Invariant("a running job is within its time limit", _beyond_its_limit, "restart its worker; look at its kind"),
    Invariant("a job that is to be cancelled ends", _not_ending, "restart its worker"),
    Invariant("a final job with a callback has a delivery", _final_without_delivery, "--fix adds it", _add_delivery),
    Invariant("a delivery follows the end of its job", _delivery_before_the_end, _PERSON),
    Invariant("a delivery that waits has an outbox row", _pending_without_row, "--fix stages one", _stage_delivery),
    Invariant("a delivery being made has a living lease", _sending_lease_is_over, _CLOCK),
    Invariant("no outbox row is parked", _parked, "mend its cause; then --fix has it tried again", message.unpark),
    Invariant("an outbox row that is due is published", _unpublished, _CLOCK),
    Invariant("a message that was overtaken is published again", _overtaken, _CLOCK),
    Invariant("a message that was published is claimed", _unclaimed, _CONSUMER),
    Invariant("an outbox row has something to do", _needless_row, "--fix removes it", _remove_row),
    Invariant("a history that succeeded has its event", _history_without_event, _PERSON),
    Invariant("an event belongs to a history that succeeded", _event_without_success, _PERSON),
    Invariant("a note has one event", _second_event, _PERSON),
    Invariant("a note has its job", _note_without_job, _PERSON),
    Invariant("an idempotency key names a job that was", _key_without_job, _PERSON),
    Invariant("an expired job is pruned", _unpruned, _CLOCK),
    Invariant("an expired tombstone is forgotten", _old_tombstone, _CLOCK),
    Invariant("an expired idempotency key is forgotten", _old_key, _CLOCK),
)
