"""Several short jobs of one message, one after another: each with a claim, an attempt and an end of its own. An end and
the claim of the next are one commit, where nothing stands against it. Those behind a job that takes long are staged
again, each for a message of its own: by a thread of this process, so that only a function that keeps all others of its
process from running holds them up."""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import clock, db, jobs, metrics, states, status
from app.jobs import Job
from tasks import celery, heart, run_job, run_together, sharing
from tasks.run_job import Outcome, Success

log = logging.getLogger("uketsuke.run")


@celery.task("tasks.run_in_turn", acks_late=True)
def run_in_turn(job_ids: list[str]) -> None:
    """Runs the first attempt of each of these jobs, unless it had one or is done: a repeated message is harmless."""
    run_all(job_ids)


def run_all(job_ids: Sequence[str], now: Callable[[], datetime] = clock.now) -> None:
    """Runs them one by one, for `sharing.MOST_SECONDS` and one job more; the others are staged again."""
    turn = _Turn(job_ids, now)
    watch = heart.take()
    watch.begin(turn, sharing.MOST_SECONDS)
    try:
        while (held := turn.next()) is not None:
            with celery.about({"job_id": held.id}):
                run_job.run(held, now, turn.end)
    finally:
        watch.give_back()
        turn.give_back()


class _Turn:
    """The jobs of one message that have not begun. Implements `heart.Beating`: when its time is over they go to others,
    as many as wait for their first attempt and are held by nobody."""

    def __init__(self, job_ids: Sequence[str], now: Callable[[], datetime]) -> None:
        self._left = dict.fromkeys(job_ids)  # of which two threads take
        self._now = now
        self._until = time.monotonic() + sharing.MOST_SECONDS
        self._claimed: Job | None = None  # with the end of the one before

    def next(self) -> Job | None:
        """The next attempt, claimed; None when there is none, or no time."""
        while self._claimed is None and (job_id := self._first()) is not None:
            self._claimed = run_job.claim(job_id, self._now(), first=True)
            self._left.pop(job_id, None)
        held, self._claimed = self._claimed, None
        return held

    def _first(self) -> str | None:
        return next(iter(list(self._left)), None) if time.monotonic() < self._until else None

    def end(self, held: Job, outcome: Outcome, now: Callable[[], datetime]) -> Job | None:
        """As `run_job.finish`; claims the next job in the same transaction, if it is free."""
        job_id = self._first()
        if job_id is None or held.callback_url is not None or not isinstance(outcome, Success):
            return run_job.finish(held, outcome, now)
        ended_at = started_at = now()  # whoever waits for the writer's turn does not run
        try:
            with db.transaction() as tx:
                started_at = now()
                after, self._claimed = jobs.succeed_and_start(
                    tx, held, outcome.result, ended_at, run_job.result_ttl(), job_id, celery.NAME, started_at,
                    run_job.lease_from(started_at))
        except (DBAPIError, PoolTimeout):  # whose fault it was shows when each is tried alone
            self._claimed = None
            return self._end_alone(held, outcome, now, job_id, started_at)
        self._begin()
        if self._claimed is not None:
            status.write_in_passing(*([after] if after else []), self._claimed)
        elif after is not None:
            status.write(after)
        return after or run_job.finish(held, outcome, now)  # cancelled, or lost

    def _begin(self) -> None:
        if self._claimed is not None:
            self._left.pop(self._claimed.id, None)
            metrics.started(self._claimed)

    def _end_alone(
        self, held: Job, outcome: Outcome, now: Callable[[], datetime], job_id: str, started_at: datetime,
    ) -> Job | None:
        """If only the answer to the commit was lost, the next job is claimed nevertheless."""
        after = run_job.finish(held, outcome, now)
        with db.reading() as view:
            following = jobs.find(view, job_id)
        if following is not None and (following.status, following.worker, following.started_at) == (
                states.RUNNING, celery.NAME, started_at):
            self._claimed = following
            self._begin()
        return after

    def beat(self) -> float:
        """Stages them again."""
        if left := list(self._left):
            staged = run_together.separate(left, self._now())
            for job_id in staged:
                self._left.pop(job_id, None)
                log.info("staged again, behind a job that takes long", extra={"job_id": job_id})
        return math.inf

    def give_back(self) -> None:
        """Whatever has not begun goes to others, also what was claimed and never run."""
        if self._claimed is not None:
            run_job.release(self._claimed, self._now(), self._now())
        self.beat()
