"""Short jobs that share a message and run one after another: each has its own claim, attempt and end, and a job that
takes long keeps none waiting."""
from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import event

from app import clock, db, jobs, kinds, outbox, presence, states, waking
from tasks import publishing, relay_outbox, rescue_stalled, run_in_turn, run_job, sharing
from tests.asking import all_at_once, another, cancel, nothing_is_wrong
from tests.conftest import World, one_database
from tests.crashing import _processes
from tests.running import a_kind, later, submit
from tests.servers import wait_until
from tests.test_together import HOOK, REFUSING, Act, messages, shown

_ran: list[str] = []
_long = threading.Event()


def act(input: Act, job: kinds.Job) -> Any:
    """Says that it ran."""
    _ran.append(job.id)
    match input.what:
        case "raise":
            raise LookupError("no luck")
        case "refuse":
            raise kinds.Refused("no")
        case "last long":
            assert _long.wait(30)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return job.attempt


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST_SECONDS", 60)


@pytest.fixture
def acting(api: FlaskClient, world: World) -> Iterator[Any]:
    """Submits jobs of a kind of which one has run, at once."""
    _ran.clear()
    _long.clear()
    with a_kind(act, input=Act, max_attempts=2) as name:
        def submitted(*whats: str, **more: Any) -> list[str]:
            return [submit(api, name, what=what, **more) for what in whats]

        (first,) = submitted("well")
        assert run_job.run_once(first) is not None
        took(world, 0.0)
        _ran.clear()
        yield submitted
        _long.set()


def took(world: World, seconds: float) -> None:
    """Has what is finished taken so long."""
    now = clock.now()
    with db.transaction() as tx:
        tx.execute(jobs.jobs.update().where(jobs.jobs.c.finished_at.is_not(None)).values(
            started_at=now - timedelta(seconds=seconds), finished_at=now))
    sharing.forget()


@one_database
@pytest.mark.parametrize("seconds, most", [(0.0, sharing.IN_TURN), (0.016, 5), (0.046, 2), (0.06, 1), (30, 1)])
def test_as_many_share_a_message_as_run_within_moments(world: World, acting: Any, seconds: float, most: int) -> None:
    took(world, seconds)
    ids = acting(*["well"] * 20)
    assert [len(message) for message in messages()] == [most] * (20 // most) + [20 % most] * (20 % most > 0)
    assert world.count("outbox") == len(ids)


@one_database
def test_kinds_that_are_not_known_well_enough_share_none(api: FlaskClient, world: World, acting: Any) -> None:
    new = [submit(api, n=5) for _ in range(2)]  # none of these has run
    gone = acting("well", "well")
    with db.transaction() as tx:
        for job_id in gone:
            outbox.settle(tx, states.RUN_JOB, job_id)
            outbox.stage(tx, states.RUN_JOB, job_id, "q:jobs2", clock.now(), together="of another deployment")
    assert sorted(messages()) == sorted([[job_id] for job_id in new + gone])


@one_database
def test_the_message_carries_ids_and_its_kinds_limit_from_the_last_start(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "MOST_SECONDS", 0.25)
    assert run_job.run_once(submit(api, n=5)) is not None
    ids = [submit(api, n=5) for _ in range(2)]
    relay_outbox.drain(publishing.publish, batch=publishing.in_one_go)
    (message,) = (json.loads(text) for text in world.redis.lrange("q:jobs2", 0, -1))
    assert message["headers"]["task"] == "tasks.run_in_turn" and message["headers"]["timelimit"] == [310.25, 300.25]
    assert message["headers"]["argsrepr"] == repr([ids])


def test_each_has_its_own_attempt_and_end(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "raise", "refuse", "well")
    assert messages() == [ids]
    run_in_turn.run_in_turn(ids)
    assert [shown(api, job_id) for job_id in ids] == [("succeeded", 1), ("queued", 1), ("failed", 1), ("succeeded", 1)]
    run_in_turn.run_in_turn([ids[0], *ids[2:]])  # a repeated message
    assert _ran == ids and messages() == [] and messages(later(60)) == [[ids[1]]]  # tried again alone
    assert world.count("jobs", "started_at IS NULL OR published_at IS NULL OR worker IS NULL") == 0
    assert nothing_is_wrong(world)


@one_database
def test_an_end_and_the_next_claim_are_one_commit(world: World, acting: Any) -> None:
    ids, commits = acting(*["well"] * 5), []
    messages()
    note = commits.append
    event.listen(db.engine(), "commit", note)
    run_in_turn.run_in_turn(ids)
    event.remove(db.engine(), "commit", note)
    assert len(commits) == 6 and _ran == ids


@one_database
def test_the_next_one_is_shown_running_while_it_runs(api: FlaskClient, world: World) -> None:
    seen = []

    def look(input: Any, job: kinds.Job) -> None:
        seen.extend((api.get(f"/jobs/{one}").json["status"], world.redis.hget(f"job:{one}", "status")) for one in ids)

    with a_kind(look) as name:
        ids = [submit(api, name) for _ in range(2)]
        run_in_turn.run_in_turn(ids)
    assert seen == [("running", "running"), ("queued", "queued"), ("succeeded", "succeeded"), ("running", "running")]


def test_who_waits_behind_a_long_one_goes_to_others(
    api: FlaskClient, world: World, acting: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "MOST_SECONDS", 1)
    ids = acting("well", "last long", "well", "well")
    assert messages() == [ids] and world.redis.delete(waking.KEY)
    working = threading.Thread(target=run_in_turn.run_in_turn, args=(ids,))
    working.start()
    wait_until(lambda: world.count("outbox", "state = 'waiting'") == 2, what="the others wait for a message")
    assert shown(api, ids[1]) == ("running", 1) and messages() == [[ids[2]], [ids[3]]]
    assert world.redis.llen(waking.KEY) == 1
    for job_id in ids[2:]:
        run_job.run_once(job_id)
    _long.set()
    working.join()
    assert Counter(_ran) == Counter(ids) and {shown(api, job_id) for job_id in ids} == {("succeeded", 1)}
    assert world.count("outbox") == 0 and nothing_is_wrong(world)


@one_database
def test_what_has_not_begun_in_time_has_a_message_of_its_own(
    api: FlaskClient, world: World, acting: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = acting("well", "well", "well")
    messages()
    monkeypatch.setattr(sharing, "MOST_SECONDS", -1)
    run_in_turn.run_in_turn(ids)
    assert _ran == [] and messages() == [[job_id] for job_id in ids]


def test_who_was_cancelled_or_claimed_meanwhile_is_passed_over(api: FlaskClient, world: World, acting: Any) -> None:
    first, cancelled, claimed, free = ids = acting(*["well"] * 4)
    messages()
    assert cancel(api, cancelled).status_code == 200
    held = run_job.claim(claimed, clock.now())
    run_in_turn.run_in_turn(ids)
    assert _ran == [first, free] and [shown(api, job_id) for job_id in (cancelled, free)] == [
        ("failed", 0), ("succeeded", 1)]
    with db.reading() as view:
        assert jobs.find(view, claimed) == held


def test_who_has_a_callback_gets_it(api: FlaskClient, world: World, acting: Any) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    ids = acting("well", "well", callback_url=HOOK) + acting("well")
    assert messages() == [ids]
    run_in_turn.run_in_turn(ids)
    assert world.count("deliveries") == 2 and {shown(api, job_id) for job_id in ids} == {("succeeded", 1)}


def test_a_refused_end_is_not_the_next_ones_fault(api: FlaskClient, world: World, acting: Any) -> None:
    """On PostgreSQL it is the commit that is refused."""
    ids = acting("well", "well", "well")
    messages()
    with db.transaction() as tx:
        tx.exec_driver_sql(REFUSING[world.dialect].format(ids[1]))
    run_in_turn.run_in_turn(ids)
    assert _ran == ids
    assert [shown(api, job_id) for job_id in ids] == [("succeeded", 1), ("queued", 1), ("succeeded", 1)]


def test_a_claim_that_is_refused_undoes_no_end(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "well", "well")
    messages()
    with db.transaction() as tx:
        tx.exec_driver_sql(REFUSING[world.dialect].format(ids[1]).replace("'succeeded'", "'running'"))
    with pytest.raises(Exception, match="TaskFailed|DB|refused|Error"):
        run_in_turn.run_all(ids)
    assert [shown(api, job_id) for job_id in ids] == [("succeeded", 1), ("queued", 0), ("queued", 0)]
    assert _ran == ids[:1] and messages() == [[ids[1]], [ids[2]]]


def test_who_lost_its_attempt_ends_nothing_and_the_next_one_runs(api: FlaskClient, world: World) -> None:
    def lose(input: Any, job: kinds.Job) -> None:
        if job.id == ids[0] and job.attempt == 1:
            rescue_stalled.run_once(later(40), {})

    with a_kind(lose) as name:
        ids = [submit(api, name) for _ in range(2)]
        run_in_turn.run_in_turn(ids)
        assert [shown(api, job_id) for job_id in ids] == [("queued", 1), ("succeeded", 1)]


def test_messages_that_overlap_run_each_job_once(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting(*["well"] * 16)
    messages()
    calls = [lambda some=ids[begin:begin + 8]: run_in_turn.run_in_turn(some) for begin in (0, 4, 8, 0, 8)]
    all_at_once(calls + [lambda one=job_id: run_job.run_once(one) for job_id in ids[::5]])
    for job_id in ids:
        run_job.run_once(job_id)  # whoever was sent back, should a machine be slow
    assert Counter(_ran) == Counter(ids) and {shown(api, job_id) for job_id in ids} == {("succeeded", 1)}
    assert world.count("outbox") == 0 and nothing_is_wrong(world)


def _run_all(environment: dict[str, str], ids: list[str], name: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    kinds.kind(name, Act, max_attempts=2)(act)
    run_in_turn.run_in_turn(ids)


def test_who_kills_its_process_takes_no_attempt_from_the_others(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "die", "well", "well")
    assert messages() == [ids]
    with db.reading() as view:
        name = jobs.find(view, ids[0]).kind
    process = _processes.Process(target=_run_all, args=(dict(os.environ), ids, name))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert [world.sql("SELECT status, attempt FROM jobs WHERE id = :id", id=job_id)[0] for job_id in ids] == [
        ("succeeded", 1), ("running", 1), ("queued", 0), ("queued", 0)]
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 2)
    memory: dict = {}
    assert [rescue_stalled.run_once(later(seconds), memory) for seconds in (60, 71)] == [1, 2]
    assert sorted(messages(later(71))) == sorted([job_id] for job_id in ids[1:])
    assert another(api).get(f"/jobs/{ids[2]}").json["status"] == "queued"
