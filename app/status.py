"""The Redis view: the hash `job:<id>`. It never decides anything: every error is logged and swallowed, and SQL answers
instead."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.connection import AbstractConnection
from redis.exceptions import ResponseError

from app import deliveries, gathering, jobs, redis_client, states, waking
from app.clock import now as the_present
from app.deliveries import Delivery
from app.gathering import Gathering
from app.jobs import Job

# How long a state that will change is shown, from when SQL had it: a stale one heals when that ends, and a write that
# comes later than that (its process or Redis stood still) shows nothing. Heartbeats renew it. Ten seconds: SQL is asked
# no more often than that for each job that waits and is polled, and nobody reads for longer what is no longer true.
UNFINISHED_TTL_SECONDS = 10
# A settled state is shown by whoever ended the job for a little longer than anything older may still be written; who
# asks later has it from SQL, and only then, since it was asked for, is it shown for long.
ENDED_TTL_SECONDS = UNFINISHED_TTL_SECONDS + 5
# An hour: whoever asks again soon has it from here, and a day of them would be 24 times the memory, 1 kB for each.
FINAL_TTL_SECONDS = 3600

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
# As it goes over the wire: packing it anew for each poll takes as long as a tenth of the round trip.
_READ_FIELDS = (b"job_id", b"owner", b"kind", b"status", b"created_at", b"started_at", b"expires_at", b"document")
_READ = b"*%d\r\n$5\r\nHMGET\r\n$%%d\r\n%%b\r\n" % (2 + len(_READ_FIELDS)) + b"".join(
    b"$%d\r\n%b\r\n" % (len(name), name) for name in _READ_FIELDS)


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


def write_in_passing(*written: Job) -> None:
    """As `write_all`, of jobs whose callback nothing is known of, by a thread that writes again when the last of them
    ends: it does not wait for Redis now."""
    if not redis_client.away():
        with redis_client.best_effort("write", job_id=written[0].id):
            redis_client.tell(_writing([(job, None) for job in written], asked_for=False))


def write_all(
    written: Sequence[tuple[Job, Delivery | None]], wake: bool = False, asked_for: bool = False,
) -> list[bool]:
    """Shows jobs as they are after a commit, in one round trip; `wake` also wakes the relay; what is `asked_for` is
    shown for longer. Returns of each whether Redis shows this version now, or a later one.

    For a job with a callback, the delivery is that of its callback once there is one.
    """
    if not written and wake:
        waking.relay()
    if redis_client.away() or not written:
        return [False] * len(written)
    with redis_client.best_effort("write", job_id=written[0][0].id):
        shown, *_ = redis_client.ask(_writing(written, asked_for), *(waking.commands() if wake else ()))
        return [each == 1 for each in shown]
    return [False] * len(written)


def _writing(written: Sequence[tuple[Job, Delivery | None]], asked_for: bool) -> tuple[str | int, ...]:
    keys, arguments = [], list[str | int]()
    for job, callback in written:
        keys.append(key(job.id))
        arguments += _fields(job, callback, asked_for)
    return "EVAL", _WRITE, len(keys), *keys, *arguments


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
    if redis_client.away():
        return None
    look = _Look(job_id)
    _looks.join(look)
    try:  # as `best_effort`, which takes a poll some microseconds
        return _understood(look)
    except redis_client.TROUBLE as error:
        redis_client.note(error, "read", job_id=job_id)
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
    if state not in states.FINAL and redis_client.seconds_since_trouble() < UNFINISHED_TTL_SECONDS:
        return None
    return View(found, owner, kind, state, created_at, started_at or None, expires_at or None, body)


def _look_for_all() -> None:
    """One round trip for all that wait, whatever one of their keys holds. A Redis that does not answer is waited for
    once: who comes meanwhile finds it away."""
    places = _looks.take()
    try:
        if not redis_client.away():
            answers = redis_client.on_own_line(lambda line: _look(line, [place.item.job_id for place in places]))
            for place, answer in zip(places, answers):
                place.item.found = answer
    except redis_client.TROUBLE as error:
        redis_client.note(error, "read")
    finally:
        _looks.hand_over()
        gathering.settle(places)


def _look(line: AbstractConnection, job_ids: list[str]) -> list[Any]:
    keys = [key(job_id).encode() for job_id in job_ids]
    asked = b"".join([_READ % (len(each), each) for each in keys])
    return redis_client.exchange(line, [asked], lambda: [_answer(line) for _ in keys])


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
    if job_ids and not redis_client.away():
        with redis_client.best_effort("forget"):
            redis_client.client().delete(*map(key, job_ids))
