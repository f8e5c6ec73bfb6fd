"""How long a job may still take, and how large the backlog is. An estimate: looked up at most once a second in a
process, so that polling costs the database nothing more."""
from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, forecast, kinds, presence, redis_client, statements, states
from app.config import settings
from app.errors import BacklogFull
from app.forecast import Queue
from app.schema import jobs, outbox

log = logging.getLogger("uketsuke.outlook")

MAX_SECONDS = 60  # of an estimate: who waits longer asks again
_FRESH_SECONDS = 1.0  # what it tells is whole seconds
_SHARE = 0.03  # of a thread's time, at most: a look that takes longer is taken less often
_PAUSE_SECONDS = 5.0  # after a database that did not answer; one that is overloaded gets no estimates to make
# Of twenty, one that took ten times as long makes the mean half as much again; of more, a change would show late.
_LATELY = 20  # jobs of a kind, whose run times count
# Places of a queue that are looked at one by one; what lies behind is taken to be alike. Each costs a web process three
# microseconds, in which it answers nobody: more of them, once a second, is what its slowest answers would be.
_PLACES = 500
_MOST = 2000  # jobs that run, and jobs that wait for their next attempt: seldom as many
_NEAR = 5000  # jobs: more than are submitted in a second
_RECOUNT_SECONDS = 10.0  # a backlog that cannot be full any sooner is counted so seldom
_HANDLING_SECONDS = 0.005  # what a job takes of its slot beside its run: message, claim, end


@dataclass(frozen=True)
class Outlook:
    """The queues, the run times of late, and how many jobs are unfinished (up to MAX_BACKLOG and one more)."""

    queues: Mapping[str, Queue] = field(default_factory=dict)
    run_seconds: Mapping[str, float] = field(default_factory=dict)
    backlog: int = 0
    due_at: Mapping[str, datetime] = field(default_factory=dict)  # of jobs that wait for their next attempt
    looked_at: datetime = forecast.LONG_AGO
    count_again_at: datetime = forecast.LONG_AGO  # the backlog is far below MAX_BACKLOG until then

    def seconds_left(
        self, kind: str, created_at: datetime, started_at: datetime | None, now: datetime, job_id: str = "",
    ) -> int:
        """When it is worth asking again for an unfinished job of this kind, which runs since `started_at` or waits:
        whole seconds, 1 to MAX_SECONDS; 1 when nothing is known."""
        run = self.run_seconds.get(kind, 0.0)
        if started_at is not None:
            seconds = forecast.left(run, (now - started_at).total_seconds())
        elif (due_at := self.due_at.get(job_id)) is not None:
            seconds = (due_at - now).total_seconds() + run
        else:
            seconds = self._seconds_before(kind, created_at) + run
        return max(1, min(MAX_SECONDS, round(seconds)))

    def _seconds_before(self, kind: str, created_at: datetime) -> float:
        known = kinds.registry().get(kind)
        if known is None or known.queue not in self.queues:
            return 0.0
        queue = self.queues[known.queue]
        unseen = _accepted[known.queue].before(created_at) if created_at > self.looked_at else 0.0
        return queue.seconds_before(created_at) + unseen / queue.slots


# --- the latest one ---

@dataclass(frozen=True)
class Accepted:
    """The work that a queue has got since the latest look, as far as this process can tell: how much by when."""

    at: list[datetime] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0])

    def before(self, created_at: datetime) -> float:
        return self.seconds[bisect.bisect_left(self.at, created_at)]


_latest = Outlook()
_accepted: defaultdict[str, Accepted] = defaultdict(Accepted)
_look_again_at = 0.0
_every_seconds = _FRESH_SECONDS
_looking = threading.Lock()


def latest() -> Outlook:
    """The outlook, about a second old at most while the database answers at once; else what was known last. Never
    raises."""
    global _latest, _look_again_at, _every_seconds
    if time.monotonic() >= _look_again_at and _looking.acquire(blocking=False):
        try:
            signs = _signs()
            began = time.monotonic()
            with db.reading() as view:
                _latest = look(view, clock.now(), signs, _latest)
            _accepted.clear()
            ended = time.monotonic()
            _every_seconds = min(_PAUSE_SECONDS, max(_FRESH_SECONDS, (ended - began) / _SHARE))
            _look_again_at = ended + _every_seconds
        except (SQLAlchemyError, OSError) as error:
            log.warning("no outlook", extra={"error": type(error).__name__})
            _look_again_at = time.monotonic() + _PAUSE_SECONDS
        finally:
            _looking.release()
    return _latest


def forget() -> None:
    """Makes the next outlook a new one."""
    global _latest, _look_again_at
    _latest, _look_again_at = Outlook(), 0.0
    _accepted.clear()


def accepted(kind: str, created_at: datetime) -> None:
    """A job of this kind was submitted, after the latest look. Other web processes take as many, for all that is
    known."""
    known = _accepted[kinds.registry()[kind].queue]
    work = _latest.run_seconds.get(kind, 0.0) + _HANDLING_SECONDS
    known.seconds.append(known.seconds[-1] + work * settings().web_workers)
    known.at.append(max([created_at, *known.at[-1:]]))


def refuse_beyond(tx: Connection, most: int, new: int) -> None:
    """Raises `errors.BacklogFull` when there would be more unfinished jobs than that with so many new ones. Far below
    that the count may be some seconds old; near it nobody else submits until the transaction ends, and each counts."""
    if _latest.backlog < most - _NEAR * _every_seconds:
        return
    if tx.dialect.name == "postgresql":
        tx.execute(_hold_backlog)
    backlog = _count_unfinished(tx, most)
    if backlog + new > most:
        raise BacklogFull(f"{backlog} jobs are unfinished")


# --- looking ---

_hold_backlog = text("SELECT pg_advisory_xact_lock(hashtextextended('backlog', 0))")
_next_due = select(outbox.c.target_id, outbox.c.available_at, outbox.c.task).where(
    outbox.c.state == states.WAITING, outbox.c.available_at > bindparam("now"),
).order_by(outbox.c.available_at).limit(_MOST).subquery()
_due_at = select(_next_due.c.target_id, _next_due.c.available_at).where(_next_due.c.task == states.RUN_JOB)

_waiting = select(jobs.c.created_at, jobs.c.kind).where(
    jobs.c.queue == bindparam("in_queue"), jobs.c.status == states.QUEUED).order_by(jobs.c.created_at).limit(_PLACES)
_first_of_queue = select(jobs.c.created_at).where(
    jobs.c.queue == bindparam("in_queue"), jobs.c.status == states.QUEUED).order_by(
    jobs.c.created_at).limit(bindparam("most")).subquery()
_length = select(func.count(), func.max(_first_of_queue.c.created_at)).select_from(_first_of_queue)
_running = select(jobs.c.queue, jobs.c.kind, jobs.c.started_at).where(jobs.c.status == states.RUNNING).limit(_MOST)
_runs = select(jobs.c.started_at, jobs.c.finished_at, jobs.c.error_code).where(
    jobs.c.kind == bindparam("of_kind"), jobs.c.finished_at.is_not(None), jobs.c.started_at.is_not(None)
).order_by(jobs.c.finished_at.desc()).limit(bindparam("most"))


def look(
    view: Connection, now: datetime, signs: Iterable[Mapping[str, Any]], before: Outlook = Outlook(),
) -> Outlook:
    """The outlook of this moment, when these workers are alive. `before`: the one before, whose count of the backlog
    may still do. Raises `sqlalchemy.exc.SQLAlchemyError`."""
    run_seconds = {kind: mean for kind in kinds.registry() if (mean := mean_run(view, kind))}
    running: dict[str, list[float]] = defaultdict(list)
    for queue, kind, started_at in view.execute(_running):
        running[queue].append(forecast.left(run_seconds.get(kind, 0.0), (now - started_at).total_seconds()))
    queues: dict[str, Queue] = {}
    for names, slots in forecast.pools({kind.queue for kind in kinds.registry().values()}, signs):
        queues |= _queues(view, names, slots, [left for name in names for left in running[name]], run_seconds)
    due_at = {row.target_id: row.available_at for row in view.execute(_due_at, {"now": now})}
    return Outlook(queues, run_seconds, looked_at=now, due_at=due_at, **_backlog(view, before, now))


def _backlog(view: Connection, before: Outlook, now: datetime) -> dict[str, Any]:
    """The count, and until when the backlog cannot have come near MAX_BACKLOG."""
    if now < before.count_again_at:
        return {"backlog": before.backlog, "count_again_at": before.count_again_at}
    most = settings().max_backlog
    backlog = _count_unfinished(view, most)
    seconds = (most - backlog) / _NEAR - 2 * _PAUSE_SECONDS  # between two looks, and once more to be far below
    return {"backlog": backlog, "count_again_at": now + timedelta(seconds=min(_RECOUNT_SECONDS, max(0.0, seconds)))}


def mean_run(view: Connection, kind: str) -> float | None:
    """How many seconds the jobs of this kind took lately; None when none is known."""
    lately = runs(view, kind, _LATELY)
    return sum(lately) / len(lately) if lately else None


def runs(view: Connection, kind: str, most: int) -> list[float]:
    """How many seconds each of the latest jobs of this kind took, from its claim until its function returned. Who was
    cancelled may have waited for its next attempt."""
    return [max(0.0, (row.finished_at - row.started_at).total_seconds())
            for row in view.execute(_runs, {"of_kind": kind, "most": most}) if row.error_code != states.CANCELLED]


def _queues(
    view: Connection, names: Iterable[str], slots: int, running: list[float], run_seconds: Mapping[str, float],
) -> dict[str, Queue]:
    """Queues that share their slots."""
    waiting = {name: statements.rows(view, _waiting, {"in_queue": name}) for name in sorted(names)}
    starts = forecast.starts(slots, running, {
        name: [run_seconds.get(kind, 0.0) + _HANDLING_SECONDS for _, kind in rows] for name, rows in waiting.items()})
    found = {}
    for name, rows in waiting.items():
        since = [created_at for created_at, _ in rows]
        if len(since) < _PLACES:
            found[name] = Queue(max(1, slots), since, starts[name], len(since))
        else:
            asked = {"in_queue": name, "most": _places_that_count(starts[name])}
            found[name] = Queue(max(1, slots), since, starts[name], *view.execute(_length, asked).one())
    return found


def _places_that_count(starts: list[float]) -> int:
    """How many of a queue's places may start within MAX_SECONDS, when those that are not known are like these."""
    return math.ceil(_PLACES * max(1.0, MAX_SECONDS / max(0.001, starts[-1] - starts[0]))) + 1


def _signs() -> list[dict[str, Any]]:
    """The workers that are alive; none when Redis does not tell."""
    if not redis_client.away():
        with redis_client.best_effort("outlook"):
            return presence.signs_of_life("worker")
    return []


def _count_unfinished(view: Connection, most: int) -> int:
    """How many jobs are unfinished; no more than so many and one are counted."""
    unfinished = select(jobs.c.id).where(jobs.c.status.in_([states.QUEUED, states.RUNNING])).limit(most + 1)
    return view.execute(select(func.count()).select_from(unfinished.subquery())).scalar_one()
