"""The rescue: attempts whose lease ran out are ended, messages that got lost are published again."""
from __future__ import annotations

import logging
import random
from dataclasses import replace
from datetime import datetime, timedelta

from redis.exceptions import RedisError
from sqlalchemy import Connection

from app import (
    backoff, circuits, clock, db, deliveries, jobs, metrics, outbox, presence, slices, status, turns, waking,
)
from app.config import settings
from app.deliveries import Attempt, Delivery
from app.jobs import Job
from app.turns import QUEUE as CALLBACKS
from tasks import attempt, celery, deliver_webhook, republishing, run_job

log = logging.getLogger("uketsuke.rescue")

# Of the rescue, before it counts as having been away: one is late now and then, and the clock leaves one out while
# another one waits; when the third has not come either, something stood still.
_TICKS_MISSED = 3
_MARGIN_SECONDS = 1.0
# A message is claimed within milliseconds of a free slot. One that waits this long beside a free slot, or while
# messages published this much later were claimed, is lost. Longer than a worker that was killed counts as one that is
# free (FRESH_SECONDS, and a tick), and than messages of two relays overtake each other.
LOST_AFTER_SECONDS = 10.0

_free_since: dict[str, datetime] = {}
_LEFT = "left of "  # before a queue's name: before when what is left of it had been published


@celery.task("tasks.rescue_stalled")
def rescue_stalled() -> None:
    """One tick of the rescue. What kept it from looking may have kept the workers from extending their leases: so when
    no rescue has looked for long, they get the time of a heartbeat first."""
    now = clock.now()
    spare_jobs = presence.rescue_was_away(
        now, settings().rescue_interval_seconds * _TICKS_MISSED, attempt.heartbeat_seconds() + _MARGIN_SECONDS)
    run_once(now, _free_since, spare_jobs)
    presence.rescue_ran(now)


def run_once(now: datetime, free_since: dict[str, datetime], spare_jobs: bool = False) -> int:
    """Ends stalled attempts of jobs (unless they are spared) and deliveries and republishes lost messages; returns how
    many it helped.

    `free_since` is this process's memory between ticks: since when each queue's workers have been seen with free slots,
    and what no tick had time for yet.
    """
    rescued = 0 if spare_jobs else _rescue_jobs(now)
    rescued += _rescue_deliveries(now) + _give_up(now) + _stage_overlooked(now)
    if rescued:
        waking.relay()
    return rescued + _republish_lost(now, free_since)


def _rescue_jobs(now: datetime) -> int:
    moved = []
    with db.transaction() as tx:
        for job in jobs.stalled(tx, now):
            after = _end_attempt(tx, job, now)
            if after is not None:
                moved.append((after, run_job.follow_up(tx, after, now, now)))
    for after, delivery in moved:
        metrics.rescued("job")
        metrics.ended(after)
        log.warning("stalled attempt ended", extra={
            "job_id": after.id, "attempt": after.attempt, "status": after.status, "worker": after.worker})
        status.write(after, delivery)
    return len(moved)


def _end_attempt(tx: Connection, job: Job, now: datetime) -> Job | None:
    ttl = timedelta(seconds=settings().result_ttl_seconds)
    if job.cancel_requested_at is not None:
        return jobs.end_cancelled(tx, job, now, ttl)
    if job.attempt < job.max_attempts:
        return jobs.requeue(tx, job)
    code, message = "crashed", f"the process that ran attempt {job.attempt} died"
    assert job.lease_until is not None and job.started_at is not None  # it is running
    last_heartbeat = job.lease_until - timedelta(seconds=settings().lease_seconds)
    if last_heartbeat - job.started_at > timedelta(seconds=job.time_limit_seconds):
        code, message = "timeout", "the attempt took longer than its kind's time limit and was killed"
    return jobs.fail(tx, job, code, message, now, ttl)


def _rescue_deliveries(now: datetime) -> int:
    with db.reading() as view:
        stalled = deliveries.stalled(view, now)
        reserved = {delivery.id for delivery in stalled if slices.is_reserved(view, delivery)}
    return sum((_set_apart if delivery.id in reserved else _end_try)(delivery, now) for delivery in stalled)


def _set_apart(delivery: Delivery, now: datetime) -> bool:
    """What was only reserved has used no attempt, whether it was sent or not."""
    with db.transaction() as tx:
        moved = slices.set_apart(tx, delivery, now)
    if moved:
        metrics.rescued("delivery")
        log.warning("stalled delivery was reserved, its attempt is made again", extra={
            "job_id": delivery.job_id, "webhook_id": delivery.id, "attempt": delivery.attempts + 1})
    return moved


def _end_try(delivery: Delivery, now: datetime) -> bool:
    why = "interrupted: the courier died; it is not known what arrived"
    tried = Attempt(delivery.id, delivery.attempts, now, None, why, 0.0, None)
    ending = replace(deliver_webhook.decide(delivery, tried, None, False, random.random(), now), answered=None)
    after = deliver_webhook.record(delivery, tried, ending, now)
    if after is not None:
        metrics.rescued("delivery")
        log.warning("stalled delivery attempt ended", extra={
            "job_id": after.job_id, "webhook_id": after.id, "attempt": after.attempts, "state": after.state})
    return after is not None


def _give_up(now: datetime) -> int:
    """Ends deliveries that have waited for a paused endpoint for as long as their whole schedule takes."""
    schedule = timedelta(seconds=backoff.jittered(sum(settings().callback_schedule_seconds), 1.0))
    with db.reading() as view:
        overdue = deliveries.overdue(view, now - schedule, now)
    return sum(_give_up_one(delivery, now) for delivery in overdue)


def _give_up_one(delivery: Delivery, now: datetime) -> bool:
    with db.transaction() as tx:
        after = deliveries.give_up(tx, delivery, "not attempted: the endpoint has failed for too long", now)
        if after is None:
            return False
        circuit = circuits.find(tx, delivery.endpoint)
        turns.stage_first(tx, delivery.endpoint, circuits.paused(circuit, now) or now, now)
        job = jobs.touch(tx, delivery.job_id)
    metrics.delivered(after.state, None)
    status.write(job, after)
    log.warning("delivery given up", extra={"job_id": after.job_id, "webhook_id": after.id, "state": after.state})
    return True


def _stage_overlooked(now: datetime) -> int:
    with db.transaction() as tx:
        return turns.stage_overlooked(tx, now - timedelta(seconds=LOST_AFTER_SECONDS), now)


def _republish_lost(now: datetime, free_since: dict[str, datetime]) -> int:
    with db.reading() as view:
        queues = outbox.queues_with_published(view)
    return sum(_republish_lost_of(queue, now, free_since, 1 / len(queues)) for queue in queues)


def _republish_lost_of(queue: str, now: datetime, free_since: dict[str, datetime], share: float = 1.0) -> int:
    """What a tick has no time for is lost still at the next one, although slots may be free no more."""
    known = [_lost_before(queue, now, free_since), free_since.pop(_LEFT + queue, None)]
    before = max(filter(None, known), default=None)
    if before is None:
        return 0
    number, more = republishing.republish(queue, before, now, republishing.seconds_of_a_tick() * share)
    if more:
        free_since[_LEFT + queue] = before
    return number


def _lost_before(queue: str, now: datetime, free_since: dict[str, datetime]) -> datetime | None:
    """The moment before which a message that was published and not claimed is lost; None when none can be told.

    Waiting long is no sign: a deep backlog that is being worked off waits too.
    """
    margin = timedelta(seconds=LOST_AFTER_SECONDS)
    if queue == CALLBACKS:  # the courier takes every message at once: what it cannot deliver now it stages again
        return now - margin if _living("courier", queue)[0] else None
    slots, workers = _living("worker", queue)
    with db.reading() as view:
        running = len(jobs.held_by(view, *workers))  # of whatever queue
        started_at, published_at = jobs.last_started(view, queue) or (None, None)
    since = free_since.setdefault(queue, now)
    if slots <= running:
        free_since.pop(queue, None)
    elif started_at is not None and started_at > since:
        free_since[queue] = now
    elif now - since >= margin:
        return now - margin  # slots have been free all the time, and nobody has claimed anything
    return None if published_at is None else published_at - margin  # consumption has moved past it


def _living(role: str, queue: str) -> tuple[int, list[str]]:
    """The slots of this queue's living consumers, and their names; none when Redis does not tell."""
    try:
        signs = [sign for sign in presence.signs_of_life(role, presence.FRESH_SECONDS) if queue in sign["queues"]]
    except (RedisError, OSError):
        return 0, []
    return sum(sign["concurrency"] for sign in signs), [sign["name"] for sign in signs]
