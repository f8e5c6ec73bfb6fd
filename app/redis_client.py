"""This process's connections to Redis: bounded, impatient, and left alone for a while after an error."""
from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionAway
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TimeoutAway
from redis.retry import Retry

from app import config

log = logging.getLogger("uketsuke.redis")

TROUBLE = (RedisError, OSError, ValueError)  # what Redis cannot do, or holds that cannot be read
_ANSWER_SECONDS = 0.5  # how long a request may wait for Redis; an answer takes a millisecond
_PAUSE_SECONDS = 1.0  # after an error Redis is left alone for so long, so that a dead one costs one wait, not each

_away_until = 0.0
_trouble_at = -math.inf  # `time.monotonic`, of the last time that Redis was away


@functools.lru_cache(maxsize=2)
def _client(pid: int) -> redis.Redis:
    # A thread holds one at a time at most, and polls have lines of their own: 64 are as many as a courier's threads.
    return redis.Redis.from_url(
        config.redis_url(), decode_responses=True, socket_timeout=_ANSWER_SECONDS,
        socket_connect_timeout=_ANSWER_SECONDS, retry=Retry(NoBackoff(), 0), max_connections=64)


def client() -> redis.Redis:
    """This process's client: bounded, impatient, asking once."""
    return _client(os.getpid())


@functools.lru_cache(maxsize=2)
def _waiting_client(pid: int) -> redis.Redis:
    longest = config.settings().relay_interval_seconds + _ANSWER_SECONDS  # a half-open connection must not hold it
    # Two relays of a process wait at a time (`tasks.relay_outbox`): 64 is a bound that they do not come near.
    return redis.Redis.from_url(
        config.redis_url(), decode_responses=True, socket_timeout=longest, socket_connect_timeout=_ANSWER_SECONDS,
        socket_keepalive=True, retry=Retry(NoBackoff(), 0), max_connections=64)


def waiting_client() -> redis.Redis:
    """As `client`, for commands that wait for up to an interval of the relay."""
    return _waiting_client(os.getpid())


# --- a thread's own line ---


class _Line(threading.local):
    """This thread's own connection: taking one from a pool costs as much as the question."""

    of: redis.Redis | None = None
    connection: AbstractConnection | None = None
    told: tuple[Sequence[bytes], ...] = ()  # packed commands whose answers nobody has waited for


_line = _Line()


def ask(*commands: tuple[Any, ...]) -> list[Any]:
    """The answers to these commands, in one round trip. They may be repeated."""
    return on_own_line(lambda line: exchange(
        line, line.pack_commands(commands), lambda: [line.read_response() for _ in commands]))


def tell(*commands: tuple[Any, ...]) -> None:
    """Sends these commands, and leaves their answers to the next question of this thread, which is to follow soon. What
    that asks is done after them. They may be repeated."""
    on_own_line(lambda line: _tell(line, [line.pack_command(*command) for command in commands]))


def _tell(line: AbstractConnection, packed: Sequence[Sequence[bytes]]) -> list[Any]:
    try:
        _line.told += (*packed,)  # before it is so: an interruption must not leave an answer that nobody expects
        line.send_packed_command([part for command in packed for part in command])
    except BaseException:
        _forget(line)
        raise
    return []


def on_own_line(talk: Callable[[AbstractConnection], list[Any]]) -> list[Any]:
    """Talks on this thread's connection; once more on a new one, since a kept one may have been closed: that says
    nothing about the server."""
    kept, told = (_line.connection, _line.told) if _line.of is client() else (None, ())
    if kept is not None:
        try:
            return talk(kept)
        except ConnectionAway:
            pass
    pool = client().connection_pool
    _line.of, _line.connection, _line.told = client(), pool.connection_class(**pool.connection_kwargs), ()
    if told:
        _tell(_line.connection, told)
    return talk(_line.connection)


def exchange(line: AbstractConnection, packed: Sequence[bytes], read: Callable[[], list[Any]]) -> list[Any]:
    """What `read` reads of the answers to this: all of them, else the line is closed."""
    try:
        line.send_packed_command(packed)
        _read_on(line)
        return read()
    except BaseException:
        _forget(line)
        raise


def _forget(line: AbstractConnection) -> None:
    """Answers that nobody has read would be taken for the next ones."""
    _line.told = ()
    line.disconnect()


def _read_on(line: AbstractConnection) -> None:
    for _ in _line.told:
        try:
            line.read_response()
        except ResponseError as error:
            note(error, "tell")
    _line.told = ()


# --- trouble ---


@contextlib.contextmanager
def best_effort(doing: str, **about: str) -> Iterator[None]:
    """Logs and swallows TROUBLE. The line has these fields too."""
    try:
        yield
    except TROUBLE as error:
        note(error, doing, **about)


def note(error: Exception, doing: str, **about: str) -> None:
    """Logs that Redis did not do it; one that is away is left alone for a moment."""
    global _away_until, _trouble_at
    if isinstance(error, ConnectionAway | TimeoutAway | OSError):
        _trouble_at = time.monotonic()
        _away_until = _trouble_at + _PAUSE_SECONDS
    # Not its message: a refusal repeats the command, which may hold a result.
    log.warning("Redis did not do it", extra={"doing": doing, "error": type(error).__name__, **about})


def away() -> bool:
    """Whether Redis failed a moment ago and is left alone for now."""
    return time.monotonic() < _away_until


def seconds_since_trouble() -> float:
    """How long ago Redis was away."""
    return time.monotonic() - _trouble_at
