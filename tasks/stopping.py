"""What a worker does with its jobs when it is asked to stop: they have WORKER_STOP_SECONDS to end by themselves, then
they are released, and others run them at once."""
from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from typing import Any

from celery import signals
from celery.concurrency import prefork
from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, logs
from app.config import settings
from tasks import celery, run_job

log = logging.getLogger("uketsuke.stopping")

_AGAIN_SECONDS = 1.0  # a supervisor that kills after 30 s leaves a few tries

_pool: prefork.TaskPool | None = None  # this worker's, once it runs


@signals.worker_ready.connect
def _remember(sender: Any, **_: Any) -> None:
    global _pool
    _pool = sender.pool if isinstance(sender.pool, prefork.TaskPool) else None


@signals.worker_shutting_down.connect
def _begin(how: str, **_: Any) -> None:
    if _pool is not None and how == "Warm":
        timer = threading.Timer(settings().worker_stop_seconds, _release_and_exit, [_pool])
        timer.daemon = True  # a worker that is done sooner does not wait for it
        timer.start()


def _release_and_exit(pool: prefork.TaskPool) -> None:
    try:
        for process in list(pool._pool._pool):  # killed first: what is released runs nowhere else
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _release_until_it_is_written()
    except Exception as error:
        log.error("not released", extra={"error": type(error).__name__, **logs.where(error)})
    finally:
        os._exit(0)


def _release_until_it_is_written() -> None:
    """Without the database nothing can be released: then it is tried again, until the supervisor loses patience. The
    leases run out, and the rescue does the same, at the price of an attempt."""
    while True:
        try:
            run_job.release_all(celery.NAME, clock.now())
            return
        except SQLAlchemyError as error:
            log.error("not released yet", extra={"error": db.reason(error)})
            time.sleep(_AGAIN_SECONDS)
