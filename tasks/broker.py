"""Celery's own processes: while the broker is in trouble they stay, try again soon, and leave no heap of ticks; of what
is over they keep nothing."""
from __future__ import annotations

import contextlib
import heapq
import logging
import time
from typing import Any

from celery import beat
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu import Connection
from kombu.transport import redis

log = logging.getLogger("uketsuke.broker")

# What kombu's channels raise when they are used, or closed, after their connection has gone.
_GONE: tuple[type[Exception], ...] = (AttributeError,)
AGAIN_SECONDS = 1.0  # between tries to reach the broker; Celery's own wait grows to 30 s
# How long the consumer's events about tasks are gathered (at most 24): a message for each costs more than to take the
# task's own. Who looks at Flower does not notice.
_EVENTS_SECONDS = 0.2
_TIMERS = 1000  # more than a worker has at work by far: some of them are cancelled
_TICKS_WAITING = 4  # more of them in the queue, and nobody takes any: further ones would only be a burst later


def _connect(connection: Connection, callback: Any = None) -> Connection:
    def tell(error: Exception, interval: float) -> None:
        log.error("the broker is away", extra={"error": f"{type(error).__name__}: {error}"})

    return connection.ensure_connection(tell, None, interval_start=AGAIN_SECONDS, interval_step=0, callback=callback)


def forget_cancelled(timer: Any) -> None:
    """Takes cancelled entries out of a kombu timer once there are many. It would keep them until they are due: half a
    kilobyte of each job, for as long as its time limit."""
    queue = timer._queue
    if len(queue) > _TIMERS:
        queue[:] = [entry for entry in queue if not entry[2].canceled]  # in place: who goes through it holds the list
        heapq.heapify(queue)


class Channel(redis.Channel):
    """kombu's, which would make a client anew for each message that is sent, taken or acknowledged."""

    _kept: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous)
        if self._kept is None or self._kept.connection_pool is not self.pool:  # another one after a lost connection
            self._kept = super()._create_client()
        return self._kept


redis.Transport.Channel = Channel


class Reconnecting(Consumer):
    """Celery's consumer, for the worker and the courier."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.connection_errors += _GONE
        self._events_due_at = 0.0

    def on_send_event_buffered(self) -> None:
        # By the clock, not by a flag: a lost connection takes the timer with it.
        moment = time.monotonic()
        if self.hub and moment >= self._events_due_at:
            self._events_due_at = moment + _EVENTS_SECONDS
            self.hub.call_later(_EVENTS_SECONDS, self._flush_events)
            forget_cancelled(self.hub.timer)

    def ensure_connected(self, conn: Connection) -> Connection:
        connected = _connect(conn, state.maybe_shutdown)
        self.first_connection_attempt = False
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # What is left of a connection may fail in any way while it is closed; it must not end the worker.
        try:
            super().on_connection_error_after_connected(exc)
        except Exception as error:
            log.warning("the old connection did not close", extra={"error": f"{type(error).__name__}: {error}"})
            self.connection = None


class Clock(beat.Scheduler):
    """Beat's schedule, in memory: no file that could be corrupt. After a stand-still each entry is due once."""

    def _ensure_connected(self) -> Connection:
        return _connect(self.connection)

    def tick(self, *arguments: Any, **more: Any) -> float:
        now = self.app.now()
        ahead = [entry for entry in self.schedule.values() if entry.last_run_at > now]
        for entry in ahead:  # the system's clock was set back: nobody waits until it is there again
            entry.last_run_at = now
        if ahead:
            self._heap = None
        return super().tick(*arguments, **more)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        broken = self.connection.connection_errors + self.connection.channel_errors + _GONE
        try:
            waiting = self._waiting(entry.options["queue"])
        except broken:
            self._forget_connection()
            waiting = 0
        if waiting > _TICKS_WAITING:
            log.warning("ticks are waiting: no courier takes them", extra={"task": entry.task})
        else:
            super().apply_entry(entry, self.producer)

    def _waiting(self, queue: str) -> int:
        return self.producer.channel.queue_declare(
            queue, durable=True, exclusive=False, auto_delete=False).message_count

    def _forget_connection(self) -> None:
        """A connection that failed may stay broken for good; the next use makes another."""
        forgotten = self.__dict__.pop("connection")
        self.__dict__.pop("producer", None)
        with contextlib.suppress(Exception):
            forgotten.collect(socket_timeout=AGAIN_SECONDS)
