"""What is true now, for a scrape: read from SQL and from Redis, so that every machine says the same.

Each question is one that an index answers and whose rows are unfinished: finished ones may be millions, and are counted
when they end (`metrics`).
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from redis.exceptions import RedisError
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from app import circuits, clock, db, kinds, outbox, presence, redis_client, states
from app.schema import deliveries as delivery_rows
from app.schema import jobs as job_rows
from app.schema import outbox as outbox_rows

log = logging.getLogger("uketsuke.metrics")

FRESH_SECONDS = 1.0  # several who scrape at once ask the database once


@dataclass(frozen=True)
class Gauge:
    """A metric that goes up and down."""

    name: str
    labels: tuple[str, ...]
    meaning: str


UNFINISHED = Gauge("uketsuke_unfinished_jobs", ("kind", "status"), "Jobs queued and running.")
OLDEST_JOB = Gauge("uketsuke_oldest_unfinished_job_seconds", (), "Age of the oldest job that is not final.")
OUTBOX = Gauge("uketsuke_outbox_rows", ("state",), "Rows of the outbox.")
OLDEST_ROW = Gauge("uketsuke_outbox_oldest_due_seconds", (), "How long the longest due row has not been published.")
DELIVERIES = Gauge("uketsuke_unfinished_deliveries", ("state",), "Callbacks pending and being sent.")
ENDPOINTS = Gauge("uketsuke_failing_endpoints", ("state",), "Callback endpoints that failed last: tried, or paused.")
RELAY = Gauge("uketsuke_relay_last_run_seconds", (), "How long ago the relay last drained the outbox.")
REACHABLE = Gauge("uketsuke_reachable", ("part",), "Whether this process reached it for this scrape.")

READ = (UNFINISHED, OLDEST_JOB, OUTBOX, OLDEST_ROW, DELIVERIES, ENDPOINTS, RELAY, REACHABLE)

Readings = list[tuple[tuple[str, ...], float]]

_lock = threading.Lock()
_last: tuple[float, list[tuple[Gauge, Readings]]] = (float("-inf"), [])


def read() -> list[tuple[Gauge, Readings]]:
    """Every gauge that can be known now, at most FRESH_SECONDS old."""
    global _last
    with _lock:
        if time.monotonic() - _last[0] >= FRESH_SECONDS:
            readings = list(_read(clock.now()))
            _last = (time.monotonic(), readings)
        return _last[1]


def forget() -> None:
    """The next `read` asks anew."""
    global _last
    _last = (float("-inf"), [])


def _read(now: datetime) -> Iterator[tuple[Gauge, Readings]]:
    known, reached = _of_database(now)
    relay, answered = _of_redis(now)
    yield from known
    yield from relay
    yield REACHABLE, [(("database",), reached), (("redis",), answered)]


def _of_database(now: datetime) -> tuple[list[tuple[Gauge, Readings]], bool]:
    try:
        with db.reading() as view:
            unfinished, oldest = _unfinished(view)
            return [
                (UNFINISHED, unfinished),
                (OLDEST_JOB, [((), _age(now, oldest))]),
                (OUTBOX, _outbox(view)),
                (OLDEST_ROW, [((), _age(now, outbox.oldest_unpublished(view)))]),
                (DELIVERIES, _deliveries(view)),
                (ENDPOINTS, _endpoints(view)),
            ], True
    except (SQLAlchemyError, OSError) as error:
        log.warning("the database did not tell", extra={"error": db.reason(error)})
        return [], False


def _of_redis(now: datetime) -> tuple[list[tuple[Gauge, Readings]], bool]:
    try:
        ran_at = None if redis_client.away() else presence.relay_ran_at()
    except (RedisError, OSError, ValueError) as error:
        log.warning("Redis did not tell", extra={"error": type(error).__name__})
        return [], False
    return [] if ran_at is None else [(RELAY, [((), _age(now, ran_at))])], not redis_client.away()


def _age(now: datetime, since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


_unfinished_jobs = (states.QUEUED, states.RUNNING)
_by_kind = select(job_rows.c.kind, job_rows.c.status, func.count(), func.min(job_rows.c.created_at)).where(
    job_rows.c.status.in_(_unfinished_jobs)).group_by(job_rows.c.kind, job_rows.c.status)


def _unfinished(view: Connection) -> tuple[Readings, datetime | None]:
    rows = view.execute(_by_kind).all()
    counts = {(kind, state): 0.0 for kind in kinds.registry() for state in _unfinished_jobs}
    counts |= {(kind, state): number for kind, state, number, _ in rows}
    return list(counts.items()), min((oldest for *_, oldest in rows), default=None)


# One statement, so one moment; each state by its own index.
_by_state = select(*(
    select(func.count()).where(outbox_rows.c.state == state).scalar_subquery() for state in states.OUTBOX_STATES))


def _outbox(view: Connection) -> Readings:
    return [((state,), number) for state, number in zip(states.OUTBOX_STATES, view.execute(_by_state).one())]


_unfinished_deliveries = (states.PENDING, states.SENDING)
_of_deliveries = select(*(
    select(func.count()).where(delivery_rows.c.state == state).scalar_subquery() for state in _unfinished_deliveries))


def _deliveries(view: Connection) -> Readings:
    return [((state,), number) for state, number in zip(_unfinished_deliveries, view.execute(_of_deliveries).one())]


def _endpoints(view: Connection) -> Readings:
    failing, paused = circuits.failing(view)
    return [(("tried",), failing - paused), (("paused",), paused)]
