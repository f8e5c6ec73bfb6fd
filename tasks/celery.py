"""The Celery app, and what each of its processes does at its start, while it lives, and at its end."""
from __future__ import annotations

import os
import signal
from typing import Any

from celery import Celery, signals

from app import db, kinds, logs, status

app = Celery("uketsuke")
app.config_from_object("celeryconfig")

ROLE = os.environ.get("UKETSUKE_ROLE", "celery")


@signals.setup_logging.connect
def _log_as_json(**_: Any) -> None:
    logs.configure(ROLE)


@signals.worker_init.connect
def _load_kinds(**_: Any) -> None:
    kinds.registry()


@signals.worker_process_init.connect
def _begin_child(**_: Any) -> None:
    # A supervisor that signals the whole group (Heroku) means the parent, which lets the running job finish. A handler,
    # since an ignored signal would stay ignored in the programs that a job starts.
    signal.signal(signal.SIGTERM, lambda *_: None)


@signals.worker_process_shutdown.connect
def _end_child(**_: Any) -> None:
    db.dispose()


@signals.heartbeat_sent.connect
def _sign_of_life(sender: Any, **_: Any) -> None:
    """Sent every 2 s by the consumer itself: a process that lives but no longer consumes gives none."""
    consumer = _consumers.get("consumer")
    if consumer is not None:
        status.give_sign_of_life(ROLE, consumer.hostname, _queues(consumer), consumer.pool.num_processes)


@signals.worker_ready.connect
def _remember(sender: Any, **_: Any) -> None:
    _consumers["consumer"] = sender
    status.give_sign_of_life(ROLE, sender.hostname, _queues(sender), sender.pool.num_processes)


@signals.worker_shutting_down.connect
def _withdraw(**_: Any) -> None:
    consumer = _consumers.pop("consumer", None)
    if consumer is not None:
        status.withdraw_sign_of_life(ROLE, consumer.hostname)


_consumers: dict[str, Any] = {}


def _queues(consumer: Any) -> list[str]:
    return sorted(queue.name for queue in consumer.task_consumer.queues) if consumer.task_consumer else []
