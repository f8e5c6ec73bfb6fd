"""The Redis view: the hash `job:<id>` and the relay's wake token. It never decides anything: every error is logged and
swallowed, and SQL answers instead."""
from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionAway
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TimeoutAway
from redis.retry import Retry

from app import config, deliveries, gathering, jobs, states
from app.clock import now as the_present
from app.deliveries import Delivery
from app.gathering import Gathering
from app.jobs import Job

log = logging.getLogger("uketsuke.status")

WAKE_KEY = "outbox:wake"
# How long a state that will change is shown, from when SQL had it: a stale one heals when that ends, and a write that
# comes later than that (its process or Redis stood still) shows nothing. Heartbeats renew it.
UNFINISHED_TTL_SECONDS = 10
# A settled state is shown by whoever ended the job for a little longer than anything older may still be written; who
# asks later has it from SQL, and only then, since it was asked for, is it shown for long.
ENDED_TTL_SECONDS = UNFINISHED_TTL_SECONDS + 5
FINAL_TTL_SECONDS = 3600
_ANSWER_SECONDS = 0.5  # how long a request may wait for Redis
_PAUSE_SECONDS = 1.0  # after an error Redis is left alone for so long, so that a dead one costs one wait, not each

# One step: an older version never covers a later one, and no hash is ever without its time to live. As many arguments
# for each key: version, milliseconds to live, when SQL had this state (in milliseconds, or empty when it does not age),
# and the fields. Answers 1 for each key that shows its version now.
_WRITE = """
local time, each, shown = redis.call('TIME'), #ARGV / #KEYS, {}
local now = math.floor(time[1] * 1000 + time[2] / 1000)
for place, key in ipairs(KEYS) do
  local before = (place - 1) * each
  local left = tonumber(ARGV[before + 2])
  if ARGV[before + 3] ~= '' then left = math.min(left, left + tonumber(ARGV[before + 3]) - now) end
  local have = tonumber(redis.call('HGET', key, 'version') or '')
  if left <= 0 or (have and have > tonumber(ARGV[before + 1])) then
    shown[place] = 0
  else
    redis.call('DEL', key)
    redis.call('HSET', key, 'version', ARGV[before + 1], unpack(ARGV, before + 4, before + each))
    redis.call('PEXPIRE', key, left)
    shown[place] = 1
  end
end
return shown
"""
_WAKE = (("LPUSH", WAKE_KEY, 1), ("LTRIM", WAKE_KEY, 0, 0))  # one token says it all
# As it goes over the wire: packing it anew for each poll takes as long as a tenth of the round trip.
_READ_FIELDS = (b"job_id", b"owner", b"kind", b"status", b"created_at", b"started_at", b"expires_at", b"document")
_READ = b"*%d\r\n$5\r\nHMGET\r\n$%%d\r\n%%b\r\n" % (2 + len(_READ_FIELDS)) + b"".join(
    b"$%d\r\n%b\r\n" % (len(name), name) for name in _READ_FIELDS)

_away_until = 0.0
# While Redis was away, SQL answered, perhaps with an end that Redis has not been told: what it shows as unfinished is
# not believed until all of that is gone, so that no reader sees a job go back.
_distrusted_until = 0.0


@dataclass(frozen=True)
class View:
    """A job as its clients read it: `body` is the document, as JSON text. The moments are those of the document."""

    job_id: str
    owner: str
    kind: str
    status: str
    created_at: str
    started_at: str | None
    expires_at: str | None
    body: str


def key(job_id: str) -> str:
    return f"job:{job_id}"


@functools.lru_cache(maxsize=2)
def _client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(
        config.redis_url(), decode_responses=True, socket_timeout=_ANSWER_SECONDS,
        socket_connect_timeout=_ANSWER_SECONDS, retry=Retry(NoBackoff(), 0), max_connections=64)


def client() -> redis.Redis:
    """This process's client: bounded, impatient, asking once."""
    return _client(os.getpid())


class _Line(threading.local):
    """This thread's own connection: taking one from a pool costs as much as the question."""

    of: redis.Redis | None = None
    connection: AbstractConnection | None = None


_line = _Line()


def _ask(*commands: tuple[Any, ...]) -> list[Any]:
    """The answers to these commands, in one round trip. They may be repeated."""
    return _on_own_line(lambda line: _exchange(
        line, line.pack_commands(commands), lambda: [line.read_response() for _ in commands]))


def _on_own_line(ask: Callable[[AbstractConnection], list[Any]]) -> list[Any]:
    """Asks on this thread's connection; once more on a new one, since a kept one may have been closed: that says
    nothing about the server."""
    kept = _line.connection if _line.of is client() else None
    if kept is not None:
        try:
            return ask(kept)
        except ConnectionAway:
            pass
    pool = client().connection_pool
    _line.of, _line.connection = client(), pool.connection_class(**pool.connection_kwargs)
    return ask(_line.connection)


def _exchange(line: AbstractConnection, packed: list[bytes], read: Callable[[], list[Any]]) -> list[Any]:
    try:
        line.send_packed_command(packed)
        return read()
    except BaseException:
        line.disconnect()  # answers that nobody has read would be taken for the next ones
        raise


@contextlib.contextmanager
def best_effort(doing: str, **about: str) -> Iterator[None]:
    """Logs and swallows what Redis cannot do, or holds that cannot be read (ValueError). The line has these fields
    too."""
    global _away_until, _distrusted_until
    try:
        yield
    except (RedisError, OSError, ValueError) as error:
        if isinstance(error, ConnectionAway | TimeoutAway | OSError):
            _away_until = time.monotonic() + _PAUSE_SECONDS
            _distrusted_until = time.monotonic() + UNFINISHED_TTL_SECONDS
        # Not its message: a refusal repeats the command, which may hold a result.
        log.warning("Redis did not do it", extra={"doing": doing, "error": type(error).__name__, **about})


def away() -> bool:
    """Whether Redis failed a moment ago and is left alone for now."""
    return time.monotonic() < _away_until


# --- the hash ---


def document(job: Job, callback: Delivery | None) -> dict[str, Any]:
    """The job as `GET /jobs/<id>` answers it."""
    shown = jobs.as_document(job)
    if callback is not None:
        shown["callback"] = deliveries.as_document(callback)
    elif job.callback_url is not None:  # asked for, and due when the job is final
        shown["callback"] = {"status": states.PENDING, "attempts": 0}
    return shown


def view(job: Job, callback: Delivery | None) -> View:
    """The job as its clients read it now."""
    shown = document(job, callback)
    return View(job.id, job.owner, job.kind, job.status, shown["created_at"], shown.get("started_at"),
                shown.get("expires_at"), json.dumps(shown, ensure_ascii=False))


def write(job: Job, callback: Delivery | None = None, wake: bool = False, asked_for: bool = False) -> bool:
    """As `write_all`, of one job."""
    return write_all([(job, callback)], wake, asked_for) == [True]


def write_all(
    written: Sequence[tuple[Job, Delivery | None]], wake: bool = False, asked_for: bool = False,
) -> list[bool]:
    """Shows jobs as they are after a commit, in one round trip; `wake` also wakes the relay; what is `asked_for` is
    shown for longer. Returns of each whether Redis shows this version now, or a later one.

    For a job with a callback, the delivery is that of its callback once there is one.
    """
    if not written and wake:
        wake_relay()
    if away() or not written:
        return [False] * len(written)
    keys, arguments = [], []
    for job, callback in written:
        keys.append(key(job.id))
        arguments += _fields(job, callback, asked_for)
    with best_effort("write", job_id=written[0][0].id):
        shown, *_ = _ask(("EVAL", _WRITE, len(keys), *keys, *arguments), *(_WAKE if wake else ()))
        return [each == 1 for each in shown]
    return [False] * len(written)


def _fields(job: Job, callback: Delivery | None, asked_for: bool) -> list[str | int]:
    settled = job.final and (callback is None or callback.finished_at is not None)
    as_of = "" if settled else int(job.as_of.timestamp() * 1000)
    shown = view(job, callback)
    return [
        job.version, _milliseconds_to_live(job, settled, asked_for), as_of, "job_id", job.id, "kind", job.kind,
        "status", job.status, "attempt", job.attempt, "owner", job.owner, "created_at", shown.created_at,
        "started_at", shown.started_at or "", "expires_at", shown.expires_at or "", "document", shown.body]


def _milliseconds_to_live(job: Job, settled: bool, asked_for: bool) -> int:
    longest = FINAL_TTL_SECONDS if asked_for else ENDED_TTL_SECONDS
    seconds = float(longest if settled else UNFINISHED_TTL_SECONDS)
    if job.expires_at is not None:
        seconds = min(seconds, (job.expires_at - the_present()).total_seconds())
    return int(seconds * 1000)


@dataclass
class _Look:
    """One who reads: the hash's fields, or what Redis says of this key; None when Redis is away."""

    job_id: str
    found: list[bytes | None] | ResponseError | None = None


def read(job_id: str) -> View | None:
    """The job as Redis knows it; None when Redis is away, does not know it, or holds something else."""
    if away():
        return None
    look = _Look(job_id)
    _looks.join(look)
    with best_effort("read", job_id=job_id):
        return _understood(look)
    return None


def _understood(look: _Look) -> View | None:
    if isinstance(look.found, ResponseError):
        raise look.found
    if look.found is None:
        return None
    texts: list[Any] = [None if field is None else field.decode() for field in look.found]
    found, owner, kind, state, created_at, started_at, expires_at, body = texts
    if found != look.job_id or not created_at or state not in states.JOB_STATUSES or not _is_of(body, found):
        return None
    if state not in states.FINAL and time.monotonic() < _distrusted_until:
        return None
    return View(found, owner, kind, state, created_at, started_at or None, expires_at or None, body)


def _look_for_all() -> None:
    """One round trip for all that wait, whatever one of their keys holds. A Redis that does not answer is waited for
    once: who comes meanwhile finds it away."""
    places = _looks.take()
    try:
        with best_effort("read"):
            if not away():
                answers = _on_own_line(lambda line: _look(line, [place.item.job_id for place in places]))
                for place, answer in zip(places, answers):
                    place.item.found = answer
    finally:
        _looks.hand_over()
        gathering.settle(places)


def _look(line: AbstractConnection, job_ids: list[str]) -> list[Any]:
    keys = [key(job_id).encode() for job_id in job_ids]
    return _exchange(line, [b"".join([_READ % (len(each), each) for each in keys])],
                     lambda: [_answer(line) for _ in keys])


def _answer(line: AbstractConnection) -> Any:
    try:
        return line.read_response(disable_decoding=True)  # what is no UTF-8 is one reader's error
    except ResponseError as error:
        return error


_looks: Gathering[_Look] = Gathering(_look_for_all)


def _is_of(body: str | None, job_id: str) -> bool:
    return body is not None and body.startswith(f'{{"job_id": "{job_id}", ') and body.endswith("}")


def forget(job_ids: list[str]) -> None:
    """Takes jobs out of the view."""
    if job_ids and not away():
        with best_effort("forget"):
            client().delete(*map(key, job_ids))


# --- the wake token ---


def wake_relay() -> None:
    """Tells a waiting relay that the outbox has something due. Without Redis it finds out at its next tick."""
    if not away():
        with best_effort("wake"):
            _ask(*_WAKE)


@functools.lru_cache(maxsize=2)
def _waiting_client(pid: int) -> redis.Redis:
    longest = config.settings().relay_interval_seconds + _ANSWER_SECONDS  # a half-open connection must not hold it
    return redis.Redis.from_url(
        config.redis_url(), decode_responses=True, socket_timeout=longest, socket_connect_timeout=_ANSWER_SECONDS,
        socket_keepalive=True, retry=Retry(NoBackoff(), 0), max_connections=64)


def wait_for_wake(seconds: float) -> bool:
    """Waits for a wake token, at most this long; False when none came or Redis is away."""
    if seconds <= 0:
        return False
    try:
        return _waiting_client(os.getpid()).blpop([WAKE_KEY], timeout=seconds) is not None
    except (RedisError, OSError):
        return False
