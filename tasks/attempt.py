"""What a running attempt holds: its lease, kept by heartbeats, and the `Job` that the kind's function sees."""
from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, jobs, status
from app.config import settings
from app.jobs import Job
from tasks import heart, interrupting

log = logging.getLogger("uketsuke.attempt")

KILL_AFTER_SECONDS = 5.0  # what an interrupted function gets to end; it needs them to clear away, not to finish
_LOOK_SECONDS = 1.0  # how soon a running attempt learns that it is to stop; a statement a second for each
# Clients are told to ask once a second at most.
_PROGRESS_SECONDS = 0.5  # how often progress reaches the view; SQL learns of it with each heartbeat


def heartbeat_seconds() -> float:
    """How often a running attempt extends its lease."""
    # Five may fail or come late before the lease is over, and one before the view lets go of the job.
    return min(settings().lease_seconds / 6, status.UNFINISHED_TTL_SECONDS / 2)


def _beat_seconds() -> float:
    return min(_LOOK_SECONDS, heartbeat_seconds())


class Attempt:
    """One attempt of one job, for the time that its function runs. Implements `app.kinds.Job`.

    As a context it keeps the lease: a thread extends it several times within its length, so that an attempt may run for
    hours, and one whose process died, froze or lost the database is noticed within LEASE_SECONDS.
    """

    def __init__(self, held: Job, end: Callable[[], None] = lambda: None) -> None:
        """`end` writes the end of a cancelled attempt whose function does not stop."""
        self._held = held
        self._end = end
        self._lost = threading.Event()
        self._cancelled = threading.Event()
        self._function_runs = True
        self._interrupt_at = self._kill_at = math.inf  # `time.monotonic`, once it is cancelled
        self._ended = False
        self._extended_at = 0.0  # `time.monotonic`
        self._progress: tuple[int, int] | None = None
        self._as_of = held.as_of  # when it was known last that the attempt is ours
        self._shown_at = 0.0
        self._shown: tuple[int, int] | None = None
        self._heart: heart.Heart | None = None

    @property
    def id(self) -> str:
        return self._held.id

    @property
    def attempt(self) -> int:
        return self._held.attempt

    def progress(self, done: int, total: int) -> None:
        self._progress = (_countable(done), _countable(total))
        if self._progress[0] >= self._progress[1]:
            return  # what is complete ends, and that says more; if it does not, the next beat shows it
        if time.monotonic() - self._shown_at >= _PROGRESS_SECONDS:
            self._show_progress()

    def _show_progress(self) -> None:
        self._shown_at, self._shown = time.monotonic(), self._progress
        status.write(self._as_shown())

    def cancelled(self) -> bool:
        return self._lost.is_set() or self._cancelled.is_set()

    def function_ended(self) -> None:
        """Says that the function has returned, so that nothing needs to interrupt it."""
        self._function_runs = False

    def _as_shown(self) -> Job:
        done, total = self._progress or (None, None)
        return Job(**{**vars(self._held), "progress_done": done, "progress_total": total, "as_of": self._as_of})

    def __enter__(self) -> Attempt:
        self._extended_at = time.monotonic()
        self._heart = heart.take()
        self._heart.begin(self, _beat_seconds())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._ended = True
        if self._heart is not None:
            self._heart.give_back()

    def beat(self) -> float:
        """Called by the heart: extends the lease, or looks whether the attempt is still wanted."""
        if self._lost.is_set():  # and not just finished a moment ago
            log.warning("the attempt is no longer ours", extra={"job_id": self.id, "attempt": self.attempt})
            return math.inf
        moment = time.monotonic()
        try:
            if moment - self._extended_at >= heartbeat_seconds():
                self._extended_at = moment
                self._extend()
            elif not self._cancelled.is_set():
                self._look()
            if self._progress != self._shown and not self._ended:
                self._show_progress()
            if self._cancelled.is_set() and self._function_runs:
                self._enforce(time.monotonic())
        except (SQLAlchemyError, OSError) as error:  # tried again at the next beat, as long as the lease stands
            log.warning("the attempt could not reach SQL", extra={"job_id": self.id, "error": type(error).__name__})
        return 1.0 if self._lost.is_set() else _beat_seconds()

    def _look(self) -> None:
        with db.reading() as view:
            if jobs.cancel_requested(view, self._held):
                self._cancelled.set()

    def _enforce(self, moment: float) -> None:
        """One beat of a cancelled attempt whose function runs: each step has its time from the step before, also in a
        process that stood still."""
        if moment >= self._kill_at:
            self._end()
            interrupting.kill()
        elif moment >= self._interrupt_at and self._kill_at == math.inf:
            self._kill_at = moment + KILL_AFTER_SECONDS
            interrupting.interrupt()
        elif self._interrupt_at == math.inf:
            self._interrupt_at = moment + settings().cancel_grace_seconds

    def _extend(self) -> None:
        done, total = self._progress or (None, None)
        until = clock.now() + timedelta(seconds=settings().lease_seconds)
        with db.transaction() as tx:
            after = jobs.extend_lease(tx, self._held, until, done, total)
        if after is None:
            self._lost.set()
            return
        if after.cancel_requested_at is not None:
            self._cancelled.set()
        self._as_of = after.as_of
        if not self._ended:
            self._shown = self._progress
            status.write(after)


def _countable(number: int) -> int:
    """A number that every JSON reader and database holds exactly (RFC 8259 6)."""
    return max(0, min(int(number), 2**53 - 1))
