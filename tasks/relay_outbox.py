"""The relay: claim due rows (short transaction), publish them (no transaction open), mark them (short transaction).

The only door to the broker. Beat starts a relay every RELAY_INTERVAL_SECONDS; each drains the outbox and then
waits for wake tokens until its interval is over, and a little longer, so that a submission is published at once.
"""
from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from amqp.exceptions import MessageNacked
from kombu.exceptions import BatchPublishError
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import clock, db, joining, metrics, outbox, presence, states, status
from app.config import settings
from app.outbox import Row
from tasks import celery, sharing

log = logging.getLogger("uketsuke.relay")

BATCH = 100  # few enough that a killed relay leaves little under its lease
LEASE_SECONDS = 15.0  # publishing a batch takes milliseconds; a relay that takes longer has died
# The relay of a tick listens for so much longer than until the next tick: no submission falls between two of them. Less
# than what `status.wait_for_wake` grants beyond an interval, and than an interval: two relays at once are enough.
_OVERLAP_SECONDS = 0.25
# Rows that come together are followed by others: they are waited for as long as nobody notices, since a claim takes
# SQLite's one writer as long for one row as for ten, and ten short jobs in a message take Celery no longer than one.
_GATHER_SECONDS = 0.025
_MARK_SECONDS = 0.05  # after which what nobody has claimed is marked: by then most has been
AWAY_SECONDS = 1.0  # when the broker takes nothing, all wait so long; as Celery does between tries (`tasks.broker`)
_REFUSED_SECONDS = 5.0  # when the broker takes everything but this row, it waits so long; parked after 20 s
_HARD_LIMIT_AFTER_SECONDS = 10.0  # a function that swallows its soft limit is killed so much later

_at_once = threading.BoundedSemaphore(2)  # a deep outbox takes many ticks; they must not take all of the threads

# AttributeError is what kombu's channels raise once their connection has gone: no fault of the row.
_AWAY = (BrokerAway, BatchPublishError, RedisError, OSError, AttributeError)

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
        except _AWAY as error:
            if at_once:
                raise BatchPublishError(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            _mine.producer, _mine.declared = None, frozenset()


def publish(row: Row, *others: Row) -> None:
    """Hands one message to the broker; it carries the row's target id, or those of all that share
    it, and nothing else.

    Raises one of _AWAY when the broker takes nothing now, anything else when this message cannot be
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
class Unmarked:
    """What the broker has taken and SQL does not say yet. It waits for a later transaction of its relay: by then most
    of it has been claimed and is gone. If the relay dies its lease runs out: a repeated message is harmless."""

    ids: dict[str, list[int]] = field(default_factory=dict)  # by their lease
    since: float = 0.0  # `time.monotonic`, of the first of them

    def add(self, lease: str, ids: list[int]) -> None:
        """These were taken now."""
        self.since = self.since if self.ids else time.monotonic()
        self.ids[lease] = ids

    def is_due(self) -> bool:
        """Whether enough time has passed."""
        return bool(self.ids) and time.monotonic() - self.since >= _MARK_SECONDS

    def mark(self, tx: Connection, now: datetime) -> None:
        """leased → published. All at once, so in the order in which everybody locks rows."""
        outbox.mark_published(tx, list(self.ids), [row_id for ids in self.ids.values() for row_id in ids], now)

    def clear(self) -> None:
        """They were marked, and that was committed."""
        self.ids = {}


def drain(
    publish: Publish, now: Callable[[], datetime] = clock.now, batch: Batch = contextlib.nullcontext,
    unmarked: Unmarked | None = None,
) -> int:
    """Publishes everything that is due; returns how many rows the broker took. Ends early when it takes none.
    `batch` surrounds the messages of one claim. The caller marks what is left `unmarked`, if it gives that."""
    published, pending = 0, Unmarked() if unmarked is None else unmarked
    while True:
        lease = secrets.token_hex(8)
        began = now()
        marks = pending.is_due()
        with db.transaction() as tx:
            if marks:
                pending.mark(tx, began)
            due = outbox.claim(tx, lease, began, began + timedelta(seconds=LEASE_SECONDS), BATCH)
        if marks:
            pending.clear()
        if not due:
            break
        rows = _needed(due, lease, began)
        taken, away = _publish_all(publish, lease, rows, now, batch, pending)
        published += taken
        if away or len(due) < BATCH:
            break
    if unmarked is None:
        _mark(pending, now())
    return published


def _needed(due: list[Row], lease: str, now: datetime) -> list[Row]:
    """Those to be published. Without the database that is all of them: a needless message is harmless."""
    try:
        return joining.withdraw(due, lease, settings().callback_per_host, now)
    except (DBAPIError, PoolTimeout) as error:
        log.warning("nothing is withdrawn", extra={"error": db.reason(error)})
        return due


def _mark(unmarked: Unmarked, now: datetime) -> None:
    if unmarked.ids:
        with db.transaction() as tx:
            unmarked.mark(tx, now)
        unmarked.clear()


def _publish_all(
    publish: Publish, lease: str, rows: list[Row], now: Callable[[], datetime], batch: Batch, unmarked: Unmarked,
) -> tuple[int, bool]:
    messages: list[list[Row]] = []
    refused: list[tuple[Row, str]] = []
    away = False
    try:
        with batch():
            for message in sharing.messages(rows):
                if (why := _refusal(publish, message)) is None:
                    messages.append(message)
                else:  # the message's own fault: it must not hold up the rows behind it
                    refused.extend((row, why) for row in message)
    except _AWAY as error:
        log.warning("the broker is away", extra={"error": f"{type(error).__name__}: {error}"})
        away = True
        if isinstance(error, BatchPublishError):
            messages = []  # perhaps they have arrived: a repeated message is harmless
    for task, number in Counter(message[0].task for message in messages).items():
        metrics.published(task, number)
    taken = list(itertools.chain.from_iterable(messages))
    if taken:
        unmarked.add(lease, [row.id for row in taken])
    done = {row.id for row in (*taken, *(row for row, _ in refused))}
    _give_back(lease, refused, [row.id for row in rows if row.id not in done], now())
    return len(taken), away


def _refusal(publish: Publish, message: list[Row]) -> str | None:
    try:
        publish(*message)
    except _AWAY:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _give_back(lease: str, refused: list[tuple[Row, str]], left: list[int], now: datetime) -> None:
    if not refused and not left:
        return
    with db.transaction() as tx:
        outbox.release(tx, lease, left, now + timedelta(seconds=AWAY_SECONDS))
        for row, why in refused:
            becomes = outbox.refuse(tx, lease, row, why, now + timedelta(seconds=_REFUSED_SECONDS))
            log.error("a row cannot be published", extra={
                "outbox_id": row.id, "target_id": row.target_id, "state": becomes, "error": why})
            if becomes == states.PARKED:
                log.error("the row is parked", extra={"outbox_id": row.id, "target_id": row.target_id})


@celery.task("tasks.relay_outbox")
def relay_outbox() -> None:
    """One tick: drains, then again at each wake token until the next tick's relay listens."""
    if not _at_once.acquire(blocking=False):
        return
    unmarked = Unmarked()
    try:
        interval = settings().relay_interval_seconds
        until = time.monotonic() + interval + min(_OVERLAP_SECONDS, interval / 2)
        while True:
            published = drain(publish, batch=in_one_go, unmarked=unmarked)
            presence.relay_ran(clock.now())
            if published > 1 and time.monotonic() < until:
                time.sleep(_GATHER_SECONDS)
            elif not status.wait_for_wake(min(_MARK_SECONDS, until - time.monotonic())):
                _mark(unmarked, clock.now())
                if not status.wait_for_wake(until - time.monotonic()):
                    return
    finally:
        _at_once.release()
        _mark(unmarked, clock.now())
