"""The Redis view: the hash `job:<id>` and the relay's wake token. It never decides anything: every error is logged and
swallowed, and SQL answers instead."""
from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionAway
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimeoutAway
from redis.retry import Retry

from app import config, deliveries, jobs, states
from app.clock import now as the_present
from app.deliveries import Delivery
from app.jobs import Job

log = logging.getLogger("uketsuke.status")

WAKE_KEY = "outbox:wake"
# How long a state that will change is shown, from when SQL had it: a stale one heals when that ends, and a write that
# comes later than that (its process or Redis stood still) shows nothing. Heartbeats renew it.
UNFINISHED_TTL_SECONDS = 10
FINAL_TTL_SECONDS = 3600
_ANSWER_SECONDS = 0.5  # how long a request may wait for Redis
_PAUSE_SECONDS = 1.0  # after an error Redis is left alone for so long, so that a dead one costs one wait, not each

# One step: an older version never covers a later one, and no hash is ever without its time to live. ARGV[3] is when SQL
# had this state, in milliseconds, or empty when it does not age.
_WRITE = """
local left = tonumber(ARGV[2])
if ARGV[3] ~= '' then
  local now = redis.call('TIME')
  left = math.min(left, left + tonumber(ARGV[3]) - math.floor(now[1] * 1000 + now[2] / 1000))
  if left <= 0 then return 0 end
end
local have = tonumber(redis.call('HGET', KEYS[1], 'version') or '')
if have and have > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'version', ARGV[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], left)
return 1
"""

_away_until = 0.0
# While Redis was away, SQL answered, perhaps with an end that Redis has not been told: what it shows as unfinished is
# not believed until all of that is gone, so that no reader sees a job go back.
_distrusted_until = 0.0


@dataclass(frozen=True)
class View:
    """A job as Redis holds it."""

    owner: str
    document: dict[str, Any]


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


def write(job: Job, callback: Delivery | None = None, wake: bool = False) -> bool:
    """Shows the job as it is after a commit, in one round trip; `wake` also wakes the relay. Returns whether Redis
    shows this version now, or a later one.

    For a job with a callback, `callback` is its delivery once there is one.
    """
    settled = job.final and (callback is None or callback.finished_at is not None)
    if away() or (left := _milliseconds_to_live(job, settled)) <= 0:
        return False
    as_of = "" if settled else int(job.as_of.timestamp() * 1000)
    shown = document(job, callback)
    fields: list[str | int] = [
        "job_id", job.id, "kind", job.kind, "status", job.status, "attempt", job.attempt, "owner", job.owner,
        "document", json.dumps(shown, ensure_ascii=False, separators=(",", ":"))]
    with best_effort("write", job_id=job.id), client().pipeline(transaction=False) as pipe:
        pipe.eval(_WRITE, 1, key(job.id), job.version, left, as_of, *fields)
        if wake:
            _wake(pipe)
        pipe.execute()
        return True
    return False


def _milliseconds_to_live(job: Job, settled: bool) -> int:
    seconds = float(FINAL_TTL_SECONDS if settled else UNFINISHED_TTL_SECONDS)
    if job.expires_at is not None:
        seconds = min(seconds, (job.expires_at - the_present()).total_seconds())
    return int(seconds * 1000)


def read(job_id: str) -> View | None:
    """The job as Redis knows it; None when Redis is away, does not know it, or holds something else."""
    if away():
        return None
    with best_effort("read", job_id=job_id):
        owner, text = client().hmget(key(job_id), "owner", "document")
        if owner is None or text is None:
            return None
        shown = json.loads(text)
        if isinstance(shown, dict) and shown.get("job_id") == job_id and shown.get("status") in states.JOB_STATUSES:
            stale = shown["status"] not in states.FINAL and time.monotonic() < _distrusted_until
            return None if stale else View(str(owner), shown)
    return None


def forget(job_ids: list[str]) -> None:
    """Takes jobs out of the view."""
    if job_ids and not away():
        with best_effort("forget"):
            client().delete(*map(key, job_ids))


# --- the wake token ---


def wake_relay() -> None:
    """Tells a waiting relay that the outbox has something due. Without Redis it finds out at its next tick."""
    if not away():
        with best_effort("wake"), client().pipeline(transaction=False) as pipe:
            _wake(pipe)
            pipe.execute()


def _wake(pipe: Any) -> None:
    pipe.lpush(WAKE_KEY, 1)
    pipe.ltrim(WAKE_KEY, 0, 0)  # one token says it all


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
