"""One attempt of one delivery: prepare (claim it), act (POST, no transaction open), record (how it ended)."""
from __future__ import annotations

import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import (
    backoff, circuits, clock, db, deliveries, excerpts, jobs, logs, metrics, signing, slices, states, status, turns,
)
from app.circuits import Circuit
from app.clock import isoformat
from app.config import settings
from app.deliveries import Attempt, Delivery
from app.errors import EndpointRefused
from app.jobs import Job
from app.slices import Claimed, Made
from tasks import celery, egress, going_on, signature, spreading, threads
from tasks.egress import Answer, Unanswered
from tasks.going_on import Batch, Recorded

log = logging.getLogger("uketsuke.deliver")

# Answers that the same request will get again.
PERMANENT = frozenset({400, 401, 403, 404, 405, 410, 413, 415, 422})
_LEASE_MARGIN_SECONDS = 15.0  # beyond the attempt's own deadline: connecting and recording
# A delivery that the courier has no thread for comes back so much later: who holds one gives it back after a quarter of
# that, as a rule (`going_on.SECONDS`).
_STEP_BACK_SECONDS = 1.0

Post = Callable[[str, bytes, dict[str, str], float], Answer]
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Ending:
    """What one attempt led to. `answered`: whether its endpoint can answer; None when it tells nothing of that."""

    becomes: str
    next_attempt_at: datetime | None
    answered: bool | None = None


_Failed = tuple[Claimed, Attempt, Ending]


@celery.task("tasks.deliver_webhook")
def deliver_webhook(delivery_id: str) -> None:
    """Makes the next attempt of this delivery, unless it is not due or somebody else makes it; then, for a moment,
    those of others that wait for the same endpoint."""
    run(delivery_id)


def run(delivery_id: str, post: Post = egress.post, now: Callable[[], datetime] = clock.now) -> list[Delivery]:
    """As `run_once`; and as long as the endpoint answers well, and until its slice is over, it goes on with the
    next, which are reserved as the last ones are recorded. Returns the deliveries as it left them."""
    return _run(delivery_id, post, now, time.monotonic() + going_on.SECONDS)


def run_once(
    delivery_id: str, post: Post = egress.post, now: Callable[[], datetime] = clock.now,
) -> Delivery | None:
    """Prepares, acts, records; returns the delivery as it left it, None when there was nothing to claim."""
    return next(iter(_run(delivery_id, post, now, until=None)), None)


def _run(delivery_id: str, post: Post, now: Callable[[], datetime], until: float | None) -> list[Delivery]:
    known = _look(delivery_id, now)
    if known is None:
        return []
    with threads.one(known.expected) as granted:
        held = _claim(known, granted, now())
        return [] if held is None else _attempt_all(slices.claimed(held, known.job), post, now, until)


def _attempt_all(first: Claimed, post: Post, now: Callable[[], datetime], until: float | None) -> list[Delivery]:
    """The attempt that is claimed, and those that follow it until then (`time.monotonic`; None: no others)."""
    ended: list[Delivery] = []
    batch = Batch(deque([first]), begins=True)
    while batch.left:
        after, batch, until = _attempt_batch(batch, post, now, until)
        ended += after
    return ended


def _attempt_batch(
    batch: Batch, post: Post, now: Callable[[], datetime], until: float | None,
) -> tuple[list[Delivery], Batch, float | None]:
    """Makes one attempt after the other, up to the first that is not answered well; returns how they ended, and what is
    to be made now. Whatever happens, what was answered is recorded, and what was not sent is given back."""
    failed: _Failed | None = None
    goes_on = None
    try:
        with going_on.watched(batch, lambda apart: _settle(apart, None, True, now)):
            while failed is None and (going := batch.next()) is not None:
                failed = _attempt(going, batch, post, now)
        goes_on = until if failed is None else None
    finally:
        done = _settle(batch, goes_on, failed is None, now)
    after = done.ended + ([] if failed is None else _record(*failed, now))
    return after, going_on.batch_of(done.following), done.until


def _attempt(claimed: Claimed, batch: Batch, post: Post, now: Callable[[], datetime]) -> _Failed | None:
    logs.concern(job_id=claimed.job.id, delivery_id=claimed.delivery.id)
    tried, retry_after, refused = _act(claimed, post, now)
    ending = decide(claimed.delivery, tried, retry_after, refused, random.random(), now())
    if ending.becomes != states.DELIVERED:
        return claimed, tried, ending
    batch.add(Made(claimed, tried))
    return None


def _settle(batch: Batch, until: float | None, stages: bool, now: Callable[[], datetime]) -> Recorded:
    done = _written(lambda: going_on.record(batch, until, stages, now(), _lease()))
    recorded = {delivery.id for delivery in done.ended}
    for made in batch.made:
        _say(made.claimed, made.tried, states.DELIVERED, made.tried.delivery_id in recorded)
    return done


def _record(claimed: Claimed, tried: Attempt, ending: Ending, now: Callable[[], datetime]) -> list[Delivery]:
    after = _written(lambda: record(claimed.delivery, tried, ending, now()))
    _say(claimed, tried, ending.becomes, after is not None)
    return [] if after is None else [after]


def _say(claimed: Claimed, tried: Attempt, becomes: str, recorded: bool) -> None:
    log.info("delivery attempted", extra={
        "job_id": claimed.job.id, "delivery_id": tried.delivery_id, "webhook_id": tried.delivery_id,
        "attempt": tried.attempt, "state": becomes, "response_code": tried.response_code,
        "error": _without_details(tried.error), "recorded": recorded})


def _written(write: Callable[[], Outcome]) -> Outcome:
    """What came of writing how attempts ended; a database that is away is asked again for as long as the lease could
    stand, so that an answer that came is not forgotten."""
    give_up = time.monotonic() + _LEASE_MARGIN_SECONDS
    while True:
        try:
            return write()
        except (DBAPIError, PoolTimeout) as error:
            if not db.is_away(error) or time.monotonic() > give_up:
                raise  # the lease runs out, and the rescue ends the attempt
            log.warning("the database is away, the attempt's end is written again", extra={"error": db.reason(error)})
            time.sleep(_STEP_BACK_SECONDS)


def _without_details(error: str | None) -> str | None:
    """What went wrong; the rest may hold what the receiver said or a part of the URL."""
    return None if error is None else error.partition(":")[0]


@dataclass(frozen=True)
class Known:
    """A delivery that is due, with what it tells of, how its endpoint answered lately, and what to expect of that."""

    delivery: Delivery
    job: Job
    circuit: Circuit | None
    expected: str | None


def _look(delivery_id: str, clock_now: Callable[[], datetime]) -> Known | None:
    with db.reading() as view:
        known = deliveries.find(view, delivery_id)
        job = None if known is None else jobs.find(view, known.job_id)
        if known is None or job is None:
            return None
        circuit = circuits.find(view, known.endpoint)
        expected = circuits.standing_of_host(view, known.host) if circuit is None else circuit.standing
    logs.concern(job_id=job.id)
    now = clock_now()  # after the look: whoever made it due a moment ago had a later clock than our beginning
    due = known.next_attempt_at is not None and known.next_attempt_at <= now
    if not due or not _final_state_is_shown(job, known, now):
        _step_back(delivery_id, now)
        return None
    if spreading.step_back(known, random.random(), now):
        return None
    return Known(known, job, circuit, expected)


def _claim(known: Known, granted: bool, now: datetime) -> Delivery | None:
    """Claims the attempt; or puts it off while its endpoint is paused, or this courier has no thread for it."""
    standing = None if known.circuit is None else known.circuit.standing
    put_off_until = circuits.paused(known.circuit, now) or (None if granted else _a_moment_later(now))
    with db.transaction() as tx:
        if put_off_until is not None:
            deliveries.put_off(tx, known.delivery.id, put_off_until, now)
            return None
        return deliveries.claim(tx, known.delivery, now, now + _lease(), settings().callback_per_host, standing)


def _lease() -> timedelta:
    return timedelta(seconds=settings().callback_timeout_seconds + _LEASE_MARGIN_SECONDS)


def _final_state_is_shown(job: Job, known: Delivery, now: datetime) -> bool:
    """Whether whoever is called back now will read the final state: the view shows it, or has had the time to forget
    the state before (the worker's own write may have been lost)."""
    return status.write(job, known) or going_on.has_been_forgotten(job, now)


def _step_back(delivery_id: str, now: datetime) -> None:
    """Not now: a delivery that is pending stays so, uses no attempt, and its message comes again."""
    with db.transaction() as tx:
        deliveries.restage(tx, delivery_id, _a_moment_later(now), now)


def _a_moment_later(now: datetime) -> datetime:
    return now + timedelta(seconds=backoff.jittered(_STEP_BACK_SECONDS, random.random()))


def body_of(job: Job) -> bytes:
    """The bytes that every attempt sends: the job as clients read it without `callback`, and what happened when."""
    assert job.finished_at is not None
    return json.dumps(
        {"type": f"job.{job.status}", "timestamp": isoformat(job.finished_at), **jobs.as_document(job)},
        ensure_ascii=False, allow_nan=False).encode()  # as GET /jobs/<id> writes it, to the byte


def _act(claimed: Claimed, post: Post, now: Callable[[], datetime]) -> tuple[Attempt, float | None, bool]:
    held, began, began_at = claimed.delivery, time.monotonic(), now()
    body = body_of(claimed.job)
    headers = signature.headers(held.id, began_at, body, signing.callback_secrets())
    code, error, excerpt, retry_after, refused = None, None, None, None, False
    try:
        answer = post(held.url, body, headers, settings().callback_timeout_seconds)
    except EndpointRefused as refusal:
        error, refused = f"refused: {refusal}", True
    except Unanswered as failure:
        code, error = failure.code, str(failure)
    else:
        code, excerpt = answer.code, excerpts.of(answer.excerpt, answer.content_encoding)
        retry_after = backoff.retry_after_seconds(answer.retry_after) if code in (429, 503) else None
    tried = Attempt(held.id, claimed.attempt, began_at, code, error, time.monotonic() - began, excerpt)
    return tried, retry_after, refused


def decide(
    held: Delivery, tried: Attempt, retry_after: float | None, refused: bool, chance: float, now: datetime,
) -> Ending:
    """What an attempt leads to: a 2xx is success, whatever became of the answer's body; PERMANENT answers and refused
    addresses end the delivery; everything else is tried again as long as the schedule lasts."""
    if refused:
        return Ending(states.REFUSED, None)
    code = tried.response_code
    if code is not None:
        if 200 <= code < 300:
            return Ending(states.DELIVERED, None, answered=True)
        if code in PERMANENT:
            return Ending(states.GONE if code == 410 else states.EXHAUSTED, None, answered=True)
    due = backoff.next_delivery_at(settings().callback_schedule_seconds, tried.attempt, chance, retry_after, now)
    return Ending(states.EXHAUSTED if due is None else states.PENDING, due, answered=False)


def record(held: Delivery, tried: Attempt, ending: Ending, now: datetime) -> Delivery | None:
    """Writes how an attempt ended, and shows it; None, and nothing written, when it is no longer this sender's."""
    with db.transaction() as tx:
        after = deliveries.record(tx, held, tried, ending.becomes, ending.next_attempt_at, now)
        if after is None:
            return None
        if ending.answered is not None:
            _note(tx, held, ending.answered, tried.duration_seconds, now)
        turns.stage_next(tx, held.host, settings().callback_per_host, now)
        job = jobs.touch(tx, held.job_id)
    metrics.delivered(after.state, tried.duration_seconds or None)  # an interrupted one took nobody knows how long
    status.write(job, after, wake=True)
    return after


def _note(tx: Connection, held: Delivery, answered: bool, seconds: float, now: datetime) -> None:
    circuit = circuits.note(tx, held.endpoint, held.host, answered, seconds, random.random(), now)
    if circuit.paused_until is not None:
        turns.stage_first(tx, held.endpoint, circuit.paused_until, now)
