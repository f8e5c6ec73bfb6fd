"""One attempt of one job: claim it (attempt, lease), run its kind, write final state and result in one transaction."""
from __future__ import annotations

import functools
import json
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import backoff, clock, db, deliveries, jobs, kinds, metrics, outbox, states, status
from app.config import settings
from app.deliveries import Delivery
from app.jobs import Job
from app.kinds import Kind
from tasks import celery
from tasks.attempt import Attempt

log = logging.getLogger("uketsuke.run")

_UNKNOWN_SECONDS = 3600.0  # a kind that no worker has known for so long after the submission will not come
_FINISH_AGAIN_SECONDS = 1.0  # between tries to write an end that the database did not take


@dataclass(frozen=True)
class Success:
    """The function returned; `result` is JSON text."""

    result: str


@dataclass(frozen=True)
class Failure:
    """The attempt ended without a result. `again`: whether another attempt may do better."""

    code: str
    message: str
    again: bool


Outcome = Success | Failure
End = Callable[[Job, Outcome, Callable[[], datetime]], Job | None]  # writes it, and returns the job as it is then


class Lost(Exception):
    """The attempt was taken from this worker: whatever it did in its transaction must not stand."""


@celery.task("tasks.run_job", acks_late=True)
def run_job(job_id: str) -> None:
    """Runs the next attempt of this job, unless somebody else has it or it is done: a repeated message is harmless."""
    run_once(job_id)


def run_once(job_id: str, now: Callable[[], datetime] = clock.now) -> Job | None:
    """Claims, runs and finishes one attempt; returns the job as it left it, None when there was nothing to claim."""
    held = claim(job_id, now())
    return None if held is None else run(held, now, finish)


def run(held: Job, now: Callable[[], datetime], end: End) -> Job | None:
    """Runs a claimed attempt, and has it ended by `end`."""
    kind = kinds.registry().get(held.kind)
    if kind is None:
        return _leave_to_others(held, now)
    began = time.monotonic()
    after = _run(held, kind, now, end)
    if after is not None:
        metrics.ended(after, time.monotonic() - began)
    log.info("attempt ended" if after else "attempt lost", extra={
        "job_id": held.id, "kind": held.kind, "attempt": held.attempt, "status": after.status if after else None,
        "error_code": after.error_code if after else None, "seconds": round(time.monotonic() - began, 3)})
    return after


def claim(job_id: str, now: datetime, first: bool = False) -> Job | None:
    """The next attempt of this job, or only the first one, of which the view is told; None when somebody else has it or
    it is done."""
    with db.transaction() as tx:
        held = jobs.start_by_message(tx, job_id, celery.NAME, now, lease_from(now), first)
        if held is None:  # perhaps it is being queued at this moment: its message must not go without a claim
            known = jobs.hold(tx, job_id)
            if first and known is not None and known.attempt > 0:
                return None
            published_at = outbox.settle(tx, states.RUN_JOB, job_id)
            held = jobs.start(tx, job_id, celery.NAME, now, lease_from(now), published_at)
    if held is None:
        log.info("nothing to claim", extra={"job_id": job_id})
        return None
    metrics.started(held)
    status.write_in_passing(held)
    return held


def lease_from(now: datetime) -> datetime:
    return now + timedelta(seconds=settings().lease_seconds)


def _leave_to_others(held: Job, now: Callable[[], datetime]) -> Job | None:
    """This worker was started without the kind's module; another may have it, or get it with the deployment that is
    under way. The attempt does not count, as long as that may take."""
    log.error("the kind is not known here: JOB_MODULES", extra={"job_id": held.id, "kind": held.kind})
    moment = now()
    if moment - held.created_at > timedelta(seconds=_UNKNOWN_SECONDS):
        after = finish(held, Failure("refused", f"no worker knows the kind {held.kind!r}", again=True), now)
        if after is not None:
            metrics.ended(after)
        return after
    return release(held, backoff.next_job_attempt_at(held.attempt, random.random(), moment), moment)


def release(held: Job, next_attempt_at: datetime, now: datetime) -> Job | None:
    """running → queued, without counting the attempt; None when it is no longer this one."""
    with db.transaction() as tx:
        ended = _write_release(tx, held, next_attempt_at, now)
    if ended is None:
        return None
    metrics.ended(ended[0])
    status.write(*ended)
    return ended[0]


def release_all(worker: str, now: datetime) -> list[Job]:
    """running → queued, due at once, of every job that this worker holds (those whose cancellation was asked for end);
    returns them as they are then."""
    with db.transaction() as tx:
        released = [ended for held in jobs.held_by(tx, worker) if (ended := _write_release(tx, held, now, now))]
    for number, ended in enumerate(released):
        log.warning("released: the worker stops", extra={"job_id": ended[0].id, "attempt": ended[0].attempt})
        metrics.ended(ended[0])
        status.write(*ended, wake=number == len(released) - 1)
    return [job for job, _ in released]


def _write_release(
    tx: Connection, held: Job, next_attempt_at: datetime, now: datetime,
) -> tuple[Job, Delivery | None] | None:
    after = jobs.release(tx, held) or jobs.end_cancelled(tx, held, now, result_ttl())
    return None if after is None else (after, follow_up(tx, after, next_attempt_at, now))


def result_ttl() -> timedelta:
    return timedelta(seconds=settings().result_ttl_seconds)


def _run(held: Job, kind: Kind, now: Callable[[], datetime], end: End) -> Job | None:
    with Attempt(held, functools.partial(_end_cancelled, held, now)) as attempt:
        if kind.transactional:
            return _run_in_transaction(held, kind, attempt, now)
        outcome = outcome_of(kind, lambda input: kind.function(input, attempt), held)
        attempt.function_ended()
        return end(held, outcome, now)


def _end_cancelled(held: Job, now: Callable[[], datetime]) -> None:
    """The end of an attempt whose function does not stop: it is written first, then nothing of it counts."""
    with db.transaction() as tx:
        after = jobs.end_cancelled(tx, held, now(), result_ttl())
        delivery = None if after is None else follow_up(tx, after, now(), now())
    if after is not None:
        log.warning("the cancelled function did not stop", extra={"job_id": held.id, "attempt": held.attempt})
        metrics.ended(after)
        status.write(after, delivery, wake=delivery is not None)


def _run_in_transaction(held: Job, kind: Kind, attempt: Attempt, now: Callable[[], datetime]) -> Job | None:
    """The function's rows and the job's success are one commit; any other end leaves none of its rows."""
    failure = None
    try:
        with db.transaction() as tx:
            outcome = outcome_of(kind, lambda input: kind.function(input, attempt, tx), held)
            if isinstance(outcome, Failure):
                failure = outcome
                raise Lost
            attempt.function_ended()
            ended = write_end(tx, held, outcome, now())
            if ended[0].status != states.SUCCEEDED:  # cancelled meanwhile: the function's rows go
                failure = Failure(states.CANCELLED, "cancelled on request", again=False)
                raise Lost
    except Lost:
        return None if failure is None else finish(held, failure, now)
    except (DBAPIError, PoolTimeout) as error:
        return finish(held, _failure(error), now)
    status.write(*ended, wake=ended[1] is not None)
    return ended[0]


def outcome_of(kind: Kind, call: Callable[[BaseModel], Any], held: Job) -> Outcome:
    process = os.getpid()
    try:
        return _success(call(kinds.read_input(kind, held.input)))
    except BaseException as error:  # whatever a kind's function raises ends its attempt, not its worker
        return _failure(error)
    finally:
        if os.getpid() != process:
            os._exit(1)  # a process that the function forked came back with it: there is one worker here


def _success(value: Any) -> Outcome:
    try:
        result = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(result.encode())
    except (TypeError, ValueError, RecursionError) as error:
        return Failure("bad_result", f"the result is not JSON: {error}", again=False)
    if size > kinds.MAX_RESULT_BYTES:
        return Failure("bad_result", f"the result has {size} bytes, {kinds.MAX_RESULT_BYTES} are allowed", again=False)
    return Success(result)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, kinds.Refused):
        return Failure("refused", str(error), again=False)
    if isinstance(error, SoftTimeLimitExceeded):
        return Failure("timeout", "the attempt took longer than its kind's time limit", again=True)
    if isinstance(error, ValidationError):
        return Failure("exception", f"the input no longer fits its kind ({error.error_count()} flaws)", again=True)
    if isinstance(error, DBAPIError):
        return Failure("exception", db.reason(error), again=True)
    return Failure("exception", f"{type(error).__name__}: {_text(error)}", again=True)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a stranger's exception, whose text is broken too
        return "(its text cannot be read)"


def finish(held: Job, outcome: Outcome, now: Callable[[], datetime]) -> Job | None:
    """Writes the end of the attempt; a database that is away is asked again for as long as the lease could stand. None
    when the attempt is lost."""
    ended_at = now()  # whoever waits for the writer's turn, or for the database, does not run
    give_up = time.monotonic() + settings().lease_seconds
    while True:
        try:
            with db.transaction() as tx:
                ended = write_end(tx, held, outcome, ended_at)
            break
        except Lost:
            return None
        except (DBAPIError, PoolTimeout) as error:
            if db.is_away(error):
                if time.monotonic() > give_up:
                    raise  # the lease runs out, and the rescue decides
                time.sleep(_FINISH_AGAIN_SECONDS)
                continue
            if not isinstance(outcome, Success):
                raise
            outcome = _failure(error)  # the end was refused, say by a trigger: that is how this attempt ended
    status.write(*ended, wake=ended[1] is not None or not ended[0].final)
    return ended[0]


def write_end(tx: Connection, held: Job, outcome: Outcome, now: datetime) -> tuple[Job, Delivery | None]:
    """The one guarded statement that ends the attempt, with what must follow from it. Raises Lost."""
    if isinstance(outcome, Success):
        after = jobs.succeed(tx, held, outcome.result, now, result_ttl())
    elif outcome.again and held.attempt < held.max_attempts:
        after = jobs.requeue(tx, held)
    else:
        after = jobs.fail(tx, held, outcome.code, outcome.message, now, result_ttl())
    after = after or jobs.end_cancelled(tx, held, now, result_ttl())
    if after is None:
        raise Lost
    return after, follow_up(tx, after, backoff.next_job_attempt_at(held.attempt, random.random(), now), now)


def follow_up(tx: Connection, job: Job, next_attempt_at: datetime, now: datetime) -> Delivery | None:
    """What a moved job makes necessary, in the transaction of the move: the message of its next attempt, or its
    callback."""
    if not job.final:
        outbox.stage(tx, states.RUN_JOB, job.id, job.queue, now, next_attempt_at, job.time_limit_seconds)
        return None
    if job.callback_url is None:
        return None
    return deliveries.add(tx, job, deliveries.first_attempt_at(now, random.random()), now)
