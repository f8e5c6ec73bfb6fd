"""The Celery app, and what each of its processes does at its start, while it lives, and at its end."""
from __future__ import annotations

import functools
import inspect
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import Celery, signals
from celery.concurrency import prefork
from sqlalchemy.exc import DBAPIError

from app import db, kinds, logs, presence

ROLE = os.environ.get("UKETSUKE_ROLE", "celery")
if ROLE in ("worker", "courier", "beat"):  # what happens before Celery sets up its own is said in the same way
    logs.configure(ROLE)

app = Celery("uketsuke")
app.config_from_object("celeryconfig")

log = logging.getLogger("uketsuke.tasks")

# This worker's, and that of the processes that it forks; no other's, ever. Its jobs and its signs of life carry it.
NAME = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@signals.setup_logging.connect
def _log_as_json(**_: Any) -> None:
    from celery.apps import worker

    logs.configure(ROLE)
    worker.safe_say = logs.say  # it would print what it does at a signal


@signals.worker_init.connect
def _load_kinds(**_: Any) -> None:
    kinds.registry()


_is_child = False


@signals.worker_process_init.connect
def _begin_child(**_: Any) -> None:
    global _is_child
    _is_child = True


def is_child() -> bool:
    """Whether this is a process of a prefork pool: it runs one task at a time, and may die."""
    return _is_child


@signals.task_prerun.connect
def _leave_stopping_to_the_parent(**_: Any) -> None:
    # A supervisor that signals the whole group (Heroku, systemd) means the parent, which lets the running job end or
    # releases it. A handler, since an ignored signal would stay ignored in the programs that a job starts; here, since
    # the pool sets its own after the process has begun.
    if _is_child:
        signal.signal(signal.SIGTERM, lambda *_: None)


@signals.worker_process_shutdown.connect
def _end_child(**_: Any) -> None:
    db.dispose()


@signals.task_failure.connect
def _say_who_died(sender: Any, exception: BaseException, args: tuple[Any, ...], **_: Any) -> None:
    """Celery's own line does not say what the process was about."""
    if isinstance(exception, WorkerLostError):
        name = next(iter(inspect.signature(sender.run).parameters), "argument")
        log.error("the process that ran the task died", extra={"task": sender.name, **dict(zip([name], args))})


_consumer: Any = None  # this process's, between its start and its stop


@signals.worker_ready.connect
def _remember(sender: Any, **_: Any) -> None:
    global _consumer
    _consumer = sender
    if ROLE != "courier" and not isinstance(sender.pool, prefork.TaskPool):
        log.error("time limits, and the release of jobs at a stop, hold with --pool prefork only")
    _give_sign_of_life()


@signals.heartbeat_sent.connect
def _give_sign_of_life(**_: Any) -> None:
    """Sent every 2 s by the consumer itself: a process that lives but no longer consumes gives none."""
    if _consumer is not None and _consumer.task_consumer is not None:
        queues = sorted(queue.name for queue in _consumer.task_consumer.queues)
        presence.give_sign_of_life(_role(queues), NAME, queues, _consumer.pool.num_processes)


@signals.worker_shutting_down.connect
def _withdraw(**_: Any) -> None:
    global _consumer
    if _consumer is not None:
        for role in ("worker", "courier"):
            presence.withdraw_sign_of_life(role, NAME)
        _consumer = None


def _role(queues: list[str]) -> str:
    return "courier" if "relay" in queues else "worker"


class TaskFailed(Exception):
    """A task of ours failed; Celery and Flower learn what it was, and nothing of what it was about."""


def about(ids: dict[str, Any]) -> AbstractContextManager[None]:
    """The lines of what runs within the block have these ids."""
    return logs.about(ids, whole_process=_is_child)


def task(name: str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Registers a function as a Celery task, and keeps inputs out of Celery's own reports of its exceptions. Its lines
    in the log have its arguments, which are ids, by their names."""

    def register(function: Callable[..., None]) -> Any:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def run(*arguments: Any) -> None:
            ids = {name: one for name, one in zip(names, arguments) if isinstance(one, str)}  # no list in each line
            with about(ids):
                try:
                    function(*arguments)
                except Exception as error:
                    reason = db.reason(error) if isinstance(error, DBAPIError) else type(error).__name__
                    log.error("task failed", extra={
                        "task": name, **dict(zip(names, arguments)), "reason": reason, **logs.where(error)})
                    raise TaskFailed(type(error).__name__) from None

        return app.task(name=name, **options)(run)

    return register
