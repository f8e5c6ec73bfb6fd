"""Several short jobs of one message, one after another: each with a claim, an attempt and an end of its own. An end and
the claim of the next are one commit, where nothing stands against it. A job that takes long keeps none waiting: those
behind it are staged again, each for a message of its own."""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import clock, db, metrics, status
from app.jobs import Job
from tasks import celery, heart, run_job, run_together, sharing
from tasks.run_job import Outcome, Success

log = logging.getLogger("uketsuke.run")


@celery.task("tasks.run_in_turn", acks_late=True)
def run_in_turn(job_ids: list[str]) -> None:
    """Runs the next attempt of each of these jobs, unless somebody else has it or it is done: a repeated message is
    harmless."""
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
        turn.beat()


class _Turn:
    """The jobs of one message that have not begun. Implements `heart.Beating`: when its time is over they go."""

    def __init__(self, job_ids: Sequence[str], now: Callable[[], datetime]) -> None:
        self._left = list(job_ids)
        self._now = now
        self._until = time.monotonic() + sharing.MOST_SECONDS
        self._claimed: Job | None = None  # with the end of the one before

    def next(self) -> Job | None:
        """The next attempt, claimed; None when there is none, or no time."""
        while self._claimed is None and (job_id := self._first()) is not None:
            self._claimed = run_job.claim(job_id, self._now())
            self._has_begun(job_id)
        held, self._claimed = self._claimed, None
        return held

    def _first(self) -> str | None:
        return next(iter(self._left), None) if time.monotonic() < self._until else None

    def _has_begun(self, job_id: str) -> None:
        self._left = [other for other in self._left if other != job_id]

    def end(self, held: Job, outcome: Outcome, now: Callable[[], datetime]) -> Job | None:
        """As `run_job.finish`; claims the next job in the same transaction, if it can."""
        job_id = self._first()
        if job_id is None or held.callback_url is not None or not isinstance(outcome, Success):
            return run_job.finish(held, outcome, now)
        ended_at = now()  # whoever waits for the writer's turn does not run
        try:
            with db.transaction() as tx:
                after, _ = run_job.write_end(tx, held, outcome, ended_at)
                following = run_job.claim_next(tx, job_id, now())
        except (run_job.Lost, DBAPIError, PoolTimeout):  # whose fault it was shows when each is tried alone
            return run_job.finish(held, outcome, now)
        if following is not None:
            self._has_begun(job_id)
            self._claimed = following
            metrics.started(following)
        status.write_all([(job, None) for job in (after, following) if job is not None])
        return after

    def beat(self) -> float:
        """Stages what has not begun."""
        if left := self._left:
            log.info("staged again, behind a job that takes long", extra={"job_ids": left})
            run_together.separate(left, self._now())
            self._left = []
            status.wake_relay()
        return math.inf
