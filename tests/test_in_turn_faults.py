"""Faults in the middle of a message that several jobs share: they cost no other job an attempt, and leave none
behind."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import signals
from celery.exceptions import SoftTimeLimitExceeded
from flask.testing import FlaskClient
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from app import clock, db, jobs, kinds, metrics, outlook, status, waking
from app.jobs import Job
from tasks import run_in_turn, run_job, run_together
from tests.asking import cancel
from tests.conftest import World, one_database
from tests.running import a_kind, later, submit
from tests.servers import wait_until
from tests.test_in_turn import _ran, acting, took, unhurried
from tests.test_together import messages, shown, submit_notes

__all__ = ["acting", "unhurried"]  # fixtures

on_postgresql = pytest.mark.parametrize("world", ["postgresql"], indirect=True)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lost_answer_to_a_commit_costs_the_next_one_nothing(
    api: FlaskClient, world: World, acting: Any, monkeypatch: pytest.MonkeyPatch, cancelled: bool,
) -> None:
    """Also when the end before it was refused."""
    ids, commit, lost = acting("well", "well", "well"), db.transaction, list[bool]()
    messages()

    @contextlib.contextmanager
    def lossy() -> Iterator[Connection]:
        with commit() as tx:
            yield tx
        if _ran and not lost:
            lost.append(True)
            raise OperationalError("COMMIT", None, ConnectionError())

    def succeed_and_start(tx: Connection, held: Job, *more: Any) -> Any:
        if cancelled and held.id == ids[0]:
            assert jobs.request_cancel(tx, held.id, clock.now()) is not None
        return together(tx, held, *more)

    together = jobs.succeed_and_start
    monkeypatch.setattr(jobs, "succeed_and_start", succeed_and_start)

    monkeypatch.setattr(db, "transaction", lossy)
    run_in_turn.run_in_turn(ids)
    assert lost and _ran == ids and world.count("jobs", "attempt = 1") == len(ids) + 1
    assert world.count("jobs", "status = 'succeeded'") == len(ids) + 1 - cancelled


def test_what_was_claimed_and_never_ran_is_given_back(
    api: FlaskClient, world: World, acting: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, write = acting("well", "well", "well"), status.write_in_passing
    messages()

    def interrupted(*written: Job) -> None:
        if len(written) == 2:
            raise SoftTimeLimitExceeded
        write(*written)

    monkeypatch.setattr(status, "write_in_passing", interrupted)
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        run_in_turn.run_in_turn(ids)
    assert world.sql("SELECT status, attempt < max_attempts FROM jobs WHERE id = :id", id=ids[1]) == [("queued", True)]
    assert _ran == ids[:1] and sorted(messages()) == [[ids[1]], [ids[2]]]


@pytest.mark.parametrize("submitted", ["jobs", "notes"])
def test_whoever_shared_the_message_of_a_dead_process_goes_to_others(
    api: FlaskClient, world: World, acting: Any, submitted: str,
) -> None:
    """The rescue could not tell that it is lost as long as all slots are busy."""
    ids = acting("die", "well", "well") if submitted == "jobs" else submit_notes(api, 3)
    assert messages() == [ids] and world.redis.delete(waking.KEY)
    assert run_job.claim(ids[0], clock.now()) is not None
    task = run_in_turn.run_in_turn if submitted == "jobs" else run_together.run_together
    signals.task_failure.send(sender=task, task_id="x", exception=WorkerLostError(), args=[ids], kwargs={})
    wait_until(lambda: world.redis.llen(waking.KEY) == 1, what="the others are staged")
    assert messages() == [[ids[1]], [ids[2]]]


@on_postgresql
def test_the_watch_forgets_nobody_whose_claim_is_under_way(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "well")
    messages()
    turn = run_in_turn._Turn(ids, clock.now)
    with pytest.raises(LookupError), db.transaction() as tx:
        assert jobs.start_by_message(tx, ids[0], "w", clock.now(), later(30)) is not None
        watch = threading.Thread(target=turn.beat)
        watch.start()
        watch.join()
        raise LookupError("the claim is refused")
    turn.give_back()
    assert sorted(messages()) == [[ids[0]], [ids[1]]]


@on_postgresql
def test_an_end_does_not_wait_for_who_holds_the_next_one(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "well")
    messages()
    with db.engine().connect() as other:
        other.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        working = threading.Thread(target=run_in_turn.run_in_turn, args=(ids,))
        working.start()
        wait_until(lambda: shown(api, ids[0]) == ("succeeded", 1), what="the first one is done")
        assert shown(api, ids[1]) == ("queued", 0)
    working.join()
    assert shown(api, ids[1]) == ("succeeded", 1)


def test_a_repeated_message_makes_no_second_attempts(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("raise", "raise", "well")
    messages()
    for _ in range(2):
        run_in_turn.run_in_turn(ids)
    assert [shown(api, job_id) for job_id in ids] == [("queued", 1), ("queued", 1), ("succeeded", 1)]
    assert sorted(messages(later(60))) == [[ids[0]], [ids[1]]]


def test_an_end_that_is_refused_is_another_one_and_the_next_job_runs(
    api: FlaskClient, world: World, acting: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both were one round trip: the claim stands."""
    def succeed_and_start(tx: Connection, held: Job, *more: Any) -> Any:
        if held.id == ids[0]:
            assert jobs.request_cancel(tx, held.id, clock.now()) is not None
        return together(tx, held, *more)

    ids, together = acting("well", "well", "well"), jobs.succeed_and_start
    messages()
    monkeypatch.setattr(jobs, "succeed_and_start", succeed_and_start)
    run_in_turn.run_in_turn(ids)
    assert _ran == ids and [shown(api, job_id) for job_id in ids] == [
        ("failed", 1), ("succeeded", 1), ("succeeded", 1)]


@one_database
def test_whoever_is_staged_again_is_as_due_as_now(api: FlaskClient, world: World, acting: Any) -> None:
    """An old backlog is no relay that stands still."""
    ids = acting("well", "well")
    messages()
    before = clock.now()
    run_together.separate(ids, clock.now())
    assert world.sql("SELECT count(*) FROM outbox WHERE available_at < :before", before=before) == [(0,)]


@one_database
def test_after_one_that_took_long_none_share(world: World, acting: Any) -> None:
    ids = acting("well")
    run_job.run_once(ids[0])
    took(world, 0.0)
    with db.transaction() as tx:
        tx.execute(jobs.jobs.update().where(jobs.jobs.c.id == ids[0]).values(started_at=later(-0.5)))
    assert [len(message) for message in messages()] == [] and acting("well", "well")
    assert [len(message) for message in messages()] == [1, 1]


@one_database
def test_kinds_with_short_limits_share_none(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: None, time_limit=5) as name:
        run_job.run_once(submit(api, name))
        ids = [submit(api, name) for _ in range(2)]
        assert messages() == [[job_id] for job_id in ids]


@one_database
def test_a_run_is_what_the_function_took(api: FlaskClient, world: World) -> None:
    """Not the wait for SQLite's writer, and not that of a cancelled job for its next attempt."""
    runs, held = threading.Event(), threading.Event()

    def hold() -> None:
        runs.wait()
        with db.transaction():
            held.set()
            threading.Event().wait(0.5)

    def function(input: Any, job: kinds.Job) -> None:
        runs.set()
        assert held.wait(30)
        if job.id == unlucky:
            raise LookupError

    with a_kind(function) as name:
        unlucky, lucky = submit(api, name), submit(api, name)
        holding = threading.Thread(target=hold)
        holding.start()
        for job_id in (lucky, unlucky):
            run_job.run_once(job_id)
        holding.join()
        with db.transaction() as tx:
            tx.execute(jobs.jobs.update().where(jobs.jobs.c.id == unlucky).values(started_at=later(-1800)))
        assert cancel(api, unlucky).status_code == 200
        with db.reading() as view:
            assert max(outlook.runs(view, name, 100)) < 0.5


@one_database
def test_a_shared_message_counts_once(world: World, acting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, int]] = []
    note: Callable[..., None] = lambda task, number=1: counted.append((task, number))
    monkeypatch.setattr(metrics, "published", note)
    acting(*["well"] * 16)
    assert len(messages()) == 1 and counted == [("run_job", 1)]
