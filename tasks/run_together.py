"""The first attempts of several short jobs in one transaction, each in a savepoint of its own: the function of each
fails alone. What breaks the whole transaction (a function that kills or hangs, a database that refuses) leaves nothing
of it, and then each job runs alone, where its attempt is counted before the run."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import signals
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from app import at_once, clock, db, jobs, kinds, logs, metrics, outbox, states, status, waking
from app.config import settings
from app.deliveries import Delivery
from app.jobs import Job
from tasks import celery, run_job
from tasks.run_job import Failure, Outcome, Success

log = logging.getLogger("uketsuke.run")

# SQLite's other writers wait for so long at most, and one function more; what is left comes with another message.
MOST_SECONDS = 0.2


@dataclass(frozen=True)
class Ran:
    """A job as it was held, and what its function came to."""

    job: Job
    outcome: Outcome
    started_at: datetime
    finished_at: datetime


class Interrupted(Exception):
    """A function was stopped by the time limit of the message, which is not its own alone."""


class _Undone(Exception):
    """Takes a function's rows back, to its savepoint."""


@dataclass(frozen=True)
class _Seen:
    """What a function sees of its attempt. It is over before anybody could ask how far it is. Implements
    `app.kinds.Job`."""

    id: str
    attempt: int

    def progress(self, done: int, total: int) -> None:
        """Nobody would see it."""

    def cancelled(self) -> bool:
        return False


@celery.task("tasks.run_together", acks_late=True)
def run_together(job_ids: list[str]) -> None:
    """Runs the first attempts of those of these jobs that wait for one: a repeated message is harmless."""
    try:
        run_all(job_ids)
    except Exception as error:
        reason = {"reason": db.reason(error)} if isinstance(error, DBAPIError) else {}
        log.warning("nothing of it stands: each job runs alone", extra={
            "job_ids": job_ids, **reason, **logs.where(error)})
        separate(job_ids, clock.now())


def run_all(job_ids: Sequence[str], now: Callable[[], datetime] = clock.now) -> list[Job]:
    """Runs and ends attempts in one transaction; returns the jobs as they are after it. Raises whatever broke it."""
    with db.transaction() as tx:
        held = at_once.hold_first(tx, job_ids)
        ran = _run_in_time([job for job in held if _may_share(job)], tx, now)
        published = outbox.settle_all(tx, states.RUN_JOB, [job.id for job in held])
        ended = _succeed(tx, ran, published) + _fail(tx, ran, published)
        over = {one.job.id for one in ran}
        left = [job for job in held if job.id not in over]
        _stage_again(tx, [job for job in left if _may_share(job)], published, now(), share=True)
        _stage_again(tx, [job for job in left if not _may_share(job)], published, now(), share=False)
    _tell(ran, {job.id: job for job in ended}, wake=bool(left))
    return ended


def _may_share(job: Job) -> bool:
    kind = kinds.registry().get(job.kind)
    return kind is not None and kind.together and job.callback_url is None


def _run_in_time(held: list[Job], tx: Connection, now: Callable[[], datetime]) -> list[Ran]:
    ran: list[Ran] = []
    until = time.monotonic() + MOST_SECONDS
    for job in held:
        if ran and time.monotonic() >= until:
            break
        started_at = now()
        outcome = _run(job, tx)
        ran.append(Ran(job, outcome, started_at, now()))
    return ran


def _run(job: Job, tx: Connection) -> Outcome:
    kind = kinds.registry()[job.kind]
    seen = _Seen(job.id, job.attempt + 1)
    try:
        with logs.about({"job_id": job.id}), tx.begin_nested():
            outcome = run_job.outcome_of(kind, lambda input: kind.function(input, seen, tx), job)
            if isinstance(outcome, Failure):
                raise _Undone
    except _Undone:
        if isinstance(outcome, Failure) and outcome.code == "timeout":
            raise Interrupted from None
    return outcome


def _succeed(tx: Connection, ran: list[Ran], published: dict[str, datetime]) -> list[Job]:
    return at_once.succeed(tx, celery.NAME, [
        at_once.Finished(one.job, one.outcome.result, one.started_at, one.finished_at, published.get(one.job.id))
        for one in ran if isinstance(one.outcome, Success)], timedelta(seconds=settings().result_ttl_seconds))


def _fail(tx: Connection, ran: list[Ran], published: dict[str, datetime]) -> list[Job]:
    """Ends these attempts one by one, as if each had run alone."""
    ended = []
    for one in ran:
        if isinstance(one.outcome, Failure):
            until = one.started_at + timedelta(seconds=settings().lease_seconds)
            held = jobs.start(tx, one.job.id, celery.NAME, one.started_at, until, published.get(one.job.id))
            if held is None:
                raise run_job.Lost
            ended.append(run_job.write_end(tx, held, one.outcome, one.finished_at)[0])
    return ended


def _stage_again(
    tx: Connection, held: list[Job], published: dict[str, datetime], now: datetime, share: bool,
) -> None:
    for job in held:
        if job.id in published:
            jobs.note_published(tx, job.id, published[job.id])
        outbox.stage(tx, states.RUN_JOB, job.id, job.queue, now, now, job.time_limit_seconds,
                     job.kind if share else None)


def separate(job_ids: Sequence[str], now: datetime) -> list[str]:
    """Stages those of these jobs that wait for their first attempt, and that nobody moves at this moment, for a message
    of their own each; returns their ids."""
    with db.transaction() as tx:
        held = at_once.hold_first(tx, job_ids)
        published = outbox.settle_all(tx, states.RUN_JOB, [job.id for job in held])
        _stage_again(tx, held, published, now, share=False)
    waking.relay()
    return [job.id for job in held]


@signals.task_failure.connect
def _leave_none_behind(exception: BaseException, args: Sequence[Any], **_: Any) -> None:
    """A process that died has taken its message with it, in the worker that goes on. Beside it: the database may be
    away."""
    if isinstance(exception, WorkerLostError) and args and isinstance(args[0], list):
        threading.Thread(target=_separate_if_possible, args=(args[0],), daemon=True).start()


def _separate_if_possible(job_ids: list[str]) -> None:
    try:
        separate(job_ids, clock.now())
    except Exception as error:  # then the rescue finds them, once it can tell that they are lost
        log.warning("not staged again", extra={"job_ids": job_ids, **logs.where(error)})


def _tell(ran: list[Ran], ended: dict[str, Job], wake: bool) -> None:
    for one in ran:
        after = ended[one.job.id]
        seconds = (one.finished_at - one.started_at).total_seconds()
        metrics.started(after)
        metrics.ended(after, seconds)
        log.info("attempt ended", extra={
            "job_id": after.id, "kind": after.kind, "attempt": after.attempt, "status": after.status,
            "error_code": after.error_code, "seconds": round(seconds, 3)})
    if wake or ran:
        shown: list[tuple[Job, Delivery | None]] = [(job, None) for job in ended.values()]
        status.write_all(shown, wake=wake or any(not job.final for job in ended.values()))
