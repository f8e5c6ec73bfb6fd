"""How a function is ended that does not end by itself: as by its time limit, softly first. Only in a process that runs
one job and nothing else (`--pool prefork`); elsewhere it runs on, and what it returns does not count."""
from __future__ import annotations

import os
import signal

from billiard.pool import SIG_SOFT_TIMEOUT

from tasks import celery


def interrupt() -> None:
    """Raises `celery.exceptions.SoftTimeLimitExceeded` in the function."""
    if celery.is_child():
        os.kill(os.getpid(), SIG_SOFT_TIMEOUT)


def kill() -> None:
    """Ends this process; the pool replaces it."""
    if celery.is_child():
        os.kill(os.getpid(), signal.SIGKILL)
