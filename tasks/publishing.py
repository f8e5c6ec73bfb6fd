"""Publishing: rows of the outbox become messages, and the broker takes them, or says why not."""
from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from amqp.exceptions import MessageNacked
from kombu.exceptions import BatchPublishError
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError

from app import metrics
from app.outbox import Row
from tasks import celery, sharing

log = logging.getLogger("uketsuke.relay")

_HARD_LIMIT_AFTER_SECONDS = 10.0  # a function that swallows its soft limit is killed so much later

# AttributeError is what kombu's channels raise once their connection has gone: no fault of the row.
AWAY = (BrokerAway, BatchPublishError, RedisError, OSError, AttributeError)

Publish = Callable[..., None]  # of the rows that share a message
Batch = Callable[[], AbstractContextManager[None]]


class _Mine(threading.local):
    """What this thread publishes with, within `in_one_go`, and the queues that are known to be there."""

    producer: Any = None
    declared: frozenset[str] | set[str] = frozenset()


_mine = _Mine()


@contextlib.contextmanager
def in_one_go() -> Iterator[None]:
    """What `publish` is given within the block is with the broker after it: over one connection and, where the
    transport can do that (Redis), in one round trip. Raises BatchPublishError when nobody knows what has arrived."""
    with celery.app.producer_pool.acquire(block=True) as producer:
        at_once = producer.supports_batch_publish
        _mine.producer, _mine.declared = producer, set()
        try:
            with producer.batch():
                yield
        except AWAY as error:
            if at_once:
                raise BatchPublishError(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            _mine.producer, _mine.declared = None, frozenset()


def publish(row: Row, *others: Row) -> None:
    """Hands one message to the broker; it carries the row's target id, or those of all that share
    it, and nothing else.

    Raises one of AWAY when the broker takes nothing now, anything else when this message cannot be
    published at all.
    """
    name, targets = f"tasks.{row.task}", [row.target_id]  # type: tuple[str, list[Any]]
    limits, later = {}, 0.0
    if others:
        (name, later), targets = sharing.task_of(row), [[one.target_id for one in (row, *others)]]
    if row.time_limit_seconds is not None:
        limits = {"soft_time_limit": row.time_limit_seconds + later,
                  "time_limit": row.time_limit_seconds + later + _HARD_LIMIT_AFTER_SECONDS}
    # What `apply_async` does, without what it works out anew for each message: half of its time.
    message = celery.app.amqp.create_task_message(
        str(uuid.uuid4()), name, targets, {}, argsrepr=repr(targets), kwargsrepr="{}", origin=celery.NAME,
        ignore_result=True, **limits)
    declare = [] if row.queue in _mine.declared else [celery.app.amqp.queues[row.queue]]
    with celery.app.producer_or_acquire(_mine.producer) as producer:
        connection = producer.connection
        try:
            producer.publish(
                message.body, exchange="", routing_key=row.queue, serializer="json", delivery_mode="persistent",
                headers=message.headers, declare=declare, **message.properties)
        except (*connection.recoverable_connection_errors, *connection.recoverable_channel_errors,
                MessageNacked) as error:
            raise BrokerAway(f"{type(error).__name__}: {error}") from error
    if isinstance(_mine.declared, set):
        _mine.declared.add(row.queue)


@dataclass
class Outcome:
    """What became of rows: those that the broker took, those whose message it refused, with the reason, and those that
    are left, since it takes nothing more."""

    taken: list[Row] = field(default_factory=list)
    refused: list[tuple[Row, str]] = field(default_factory=list)
    left: list[Row] = field(default_factory=list)


def publish_all(publish: Publish, rows: list[Row], batch: Batch) -> Outcome:
    """Publishes rows, several in a message where they may share one."""
    found = Outcome()
    messages: list[list[Row]] = []
    try:
        with batch():
            for message in sharing.messages(rows):
                if (why := _refusal(publish, message)) is None:
                    messages.append(message)
                else:  # the message's own fault: it must not hold up the rows behind it
                    found.refused.extend((row, why) for row in message)
    except AWAY as error:
        log.warning("the broker is away", extra={"error": f"{type(error).__name__}: {error}"})
        if isinstance(error, BatchPublishError):
            messages = []  # perhaps they have arrived: a repeated message is harmless
    for task, number in Counter(message[0].task for message in messages).items():
        metrics.published(task, number)
    found.taken = [row for message in messages for row in message]
    done = {row.target_id for row in (*found.taken, *(row for row, _ in found.refused))}
    found.left = [row for row in rows if row.target_id not in done]
    return found


def _refusal(publish: Publish, message: list[Row]) -> str | None:
    try:
        publish(*message)
    except AWAY:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
