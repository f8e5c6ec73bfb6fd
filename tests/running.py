"""Running jobs in the test process: the real functions, with the clock and the world as arguments."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel

from app import clock, db, deliveries, kinds
from app.jobs import Job
from app.kinds import Kind
from app.outbox import Row
from tasks import relay_outbox, run_job

_names = (f"test-{number}" for number in itertools.count())


class Anything(BaseModel):
    """An input without members."""


@contextmanager
def a_kind(function: Callable[..., Any], **limits: Any) -> Iterator[str]:
    """Registers a kind for the time of a test; gives its name."""
    name = next(_names)
    kinds.kind(name, limits.pop("input", Anything), **limits)(function)
    try:
        yield name
    finally:
        del kinds._registered[name]


def kind(name: str) -> Kind:
    return kinds.registry()[name]


def submit(api: FlaskClient, kind: str = "primes", **members: Any) -> str:
    """Submits a job over HTTP and returns its id."""
    answer = api.post("/jobs", json={"kind": kind, **members})
    assert answer.status_code == 202, answer.text
    return answer.json["job_id"]


def finish(api: FlaskClient, url: str, **members: Any) -> str:
    """Runs a job with this callback; returns the delivery's id."""
    job_id = submit(api, **(members or {"n": 5}), callback_url=url)
    run_job.run_once(job_id)
    with db.reading() as view:
        delivery = deliveries.latest_of_job(view, job_id)
    assert delivery is not None
    return delivery.id


class Broker:
    """Stands where the relay hands over: keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def publish(self, *rows: Row) -> None:
        self.rows.extend(rows)

    def taken(self) -> list[tuple[str, str]]:
        return [(row.task, row.target_id) for row in self.rows]


def relay(now: datetime | None = None) -> list[tuple[str, str]]:
    """One drain of the outbox into a list."""
    broker = Broker()
    relay_outbox.drain(broker.publish, now=lambda: now or clock.now())
    return broker.taken()


def run_to_end(job_id: str, attempts: int = 30) -> Job:
    """Runs attempt after attempt, without waiting between them, until the job is final."""
    for _ in range(attempts):
        after = run_job.run_once(job_id)
        if after is not None and after.final:
            return after
    raise AssertionError("not final")


def later(seconds: float) -> datetime:
    return clock.now() + timedelta(seconds=seconds)


class Crash(BaseException):
    """The process dies here."""


def die_in_mid_job(job_id: str) -> None:
    """An attempt whose process dies before its end is written."""
    moments = iter([clock.now()])

    def now() -> datetime:
        try:
            return next(moments)
        except StopIteration:
            raise Crash from None

    with pytest.raises(Crash):
        run_job.run_once(job_id, now=now)
