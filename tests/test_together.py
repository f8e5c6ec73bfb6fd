"""Short jobs that share a message and a transaction: each fails, is tried again and is fenced as if it ran alone."""
from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from flask.testing import FlaskClient
from pydantic import BaseModel

from app import at_once, clock, db, jobs, kinds, notes, outbox, presence, states, waking
from tasks import publishing, relay_outbox, rescue_stalled, run_job, run_together, sharing
from tests.asking import all_at_once, another, cancel, nothing_is_wrong
from tests.conftest import World, one_database
from tests.crashing import _processes
from tests.running import Broker, a_kind, later, relay, submit

HOOK = "http://127.0.0.1:9/"


def submit_notes(api: FlaskClient, number: int, **more: Any) -> list[str]:
    return [api.post("/notes", json={"text": "x", **more}).json["job_id"] for _ in range(number)]


def messages(now: Any = None) -> list[list[str]]:
    """One drain of the outbox: the jobs that each message names."""
    taken: list[list[str]] = []
    relay_outbox.drain(lambda *rows: taken.append([row.target_id for row in rows]), now=lambda: now or clock.now())
    return taken


def shown(api: FlaskClient, job_id: str) -> tuple[str, int]:
    job = api.get(f"/jobs/{job_id}").json
    return job["status"], job["attempt"]


def told(world: World) -> Counter[int]:
    return Counter(row[0] for row in world.sql("SELECT note_id FROM history_events"))


def test_notes_share_messages_of_a_bounded_size(api: FlaskClient, world: World) -> None:
    ids = submit_notes(api, sharing.TOGETHER + 3)
    assert messages() == [ids[:sharing.TOGETHER], ids[sharing.TOGETHER:]]
    for some in (ids[:sharing.TOGETHER], ids[sharing.TOGETHER:], ids):  # the last one repeats them
        run_together.run_together(some)
    assert {shown(api, job_id) for job_id in ids} == {("succeeded", 1)}
    assert len(told(world)) == len(ids) and set(told(world).values()) == {1} and world.count("outbox") == 0
    assert world.count("jobs", "started_at IS NULL OR published_at IS NULL OR worker IS NULL OR version <> 2") == 0
    assert nothing_is_wrong(world)


@one_database
def test_the_shared_message_carries_ids_and_the_limits_of_its_kind(api: FlaskClient, world: World) -> None:
    ids, alone = submit_notes(api, 3), submit(api, n=5)
    relay_outbox.drain(publishing.publish, batch=publishing.in_one_go)
    first, second = (json.loads(text) for text in reversed(world.redis.lrange("q:jobs2", 0, -1)))
    assert [first["headers"]["task"], second["headers"]["task"]] == ["tasks.run_together", "tasks.run_job"]
    assert first["headers"]["timelimit"] == [70.0, 60.0] and alone in second["headers"]["argsrepr"]
    assert all(job_id in first["headers"]["argsrepr"] for job_id in ids)


class Act(BaseModel):
    what: str


def act(input: Act, job: kinds.Job, tx: Any) -> Any:
    """Writes a note in any case."""
    notes.add(tx, [("everybody", input.what)], clock.now())
    match input.what:
        case "raise":
            raise LookupError("no luck")
        case "refuse":
            raise kinds.Refused("no")
        case "badly":
            return object()
        case "break":
            notes.append_event(tx, 10**6, "created", job.id, clock.now())  # of a note that is not there
        case "hang":
            raise SoftTimeLimitExceeded
    return job.attempt


@pytest.fixture
def acting(api: FlaskClient) -> Any:
    with a_kind(act, input=Act, transactional=True, together=True, max_attempts=2) as name:
        yield lambda *whats: [submit(api, name, what=what) for what in whats]


def kept(world: World) -> list[str]:
    return sorted(row[0] for row in world.sql("SELECT text FROM notes"))


def test_each_fails_alone_and_is_tried_again_alone(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "raise", "refuse", "badly", "break", "very well")
    assert messages() == [ids]
    run_together.run_together(ids)
    assert [shown(api, job_id) for job_id in ids] == [
        ("succeeded", 1), ("queued", 1), ("failed", 1), ("failed", 1), ("queued", 1), ("succeeded", 1)]
    assert kept(world) == ["very well", "well"]  # whoever failed has left nothing
    run_together.run_together(ids)  # a repeated message: those have an attempt of their own before them
    assert messages() == [] and sorted(messages(later(60))) == sorted([[ids[1]], [ids[4]]])
    after = [run_job.run_once(ids[number]) for number in (1, 4)]
    assert [(job.status, job.attempt, job.error_code) for job in after] == [("failed", 2, "exception")] * 2
    assert kept(world) == ["very well", "well"] and world.count("outbox") == 0


def test_who_hangs_takes_no_attempt_from_the_others(api: FlaskClient, world: World, acting: Any) -> None:
    ids = acting("well", "hang", "very well")
    assert messages() == [ids] and world.redis.delete(waking.KEY)
    run_together.run_together(ids)
    assert {shown(api, job_id) for job_id in ids} == {("queued", 0)} and kept(world) == []
    assert messages() == [[job_id] for job_id in ids] and world.redis.llen(waking.KEY) == 1
    after = [run_job.run_once(job_id) for job_id in ids]
    assert [(job.status, job.attempt) for job in after] == [("succeeded", 1), ("queued", 1), ("succeeded", 1)]


REFUSING = {
    "sqlite": "CREATE TRIGGER refusing BEFORE UPDATE ON jobs WHEN NEW.status = 'succeeded' AND NEW.id = '{0}' "
              "BEGIN SELECT RAISE(ABORT, 'refused'); END",
    "postgresql": "CREATE FUNCTION refusing() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$ "
                  "LANGUAGE plpgsql; CREATE CONSTRAINT TRIGGER refusing AFTER UPDATE ON jobs "
                  "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.status = 'succeeded' AND NEW.id = '{0}') "
                  "EXECUTE FUNCTION refusing()"}


def test_a_transaction_that_is_refused_leaves_each_to_run_alone(
    api: FlaskClient, world: World, acting: Any,
) -> None:
    """On PostgreSQL it is the commit that is refused."""
    ids = acting("well", "ill", "very well")
    messages()
    with db.transaction() as tx:
        tx.exec_driver_sql(REFUSING[world.dialect].format(ids[1]))
    run_together.run_together(ids)
    assert {shown(api, job_id) for job_id in ids} == {("queued", 0)} and kept(world) == []
    assert messages() == [[job_id] for job_id in ids]
    after = [run_job.run_once(job_id) for job_id in ids]
    assert [(job.status, job.attempt) for job in after] == [("succeeded", 1), ("queued", 1), ("succeeded", 1)]
    assert kept(world) == ["very well", "well"]


def test_what_takes_too_long_together_is_left_for_another_message(
    api: FlaskClient, world: World, acting: Any, monkeypatch: Any,
) -> None:
    monkeypatch.setattr(run_together, "MOST_SECONDS", 0)
    ids = acting("1", "2", "3")
    assert messages() == [ids] and world.redis.delete(waking.KEY)
    run_together.run_together(ids)
    assert [shown(api, job_id) for job_id in ids] == [("succeeded", 1), ("queued", 0), ("queued", 0)]
    assert world.redis.llen(waking.KEY) == 1 and messages() == [ids[1:]]
    run_together.run_together(ids[1:])
    assert shown(api, ids[1]) == ("succeeded", 1) and shown(api, ids[2]) == ("queued", 0) and kept(world) == ["1", "2"]


def test_who_was_cancelled_or_claimed_meanwhile_is_passed_over(api: FlaskClient, world: World) -> None:
    cancelled, claimed, free = ids = submit_notes(api, 3)
    messages()
    assert cancel(api, cancelled).status_code == 200
    held = run_job.claim(claimed, clock.now())
    run_together.run_together(ids)
    assert [shown(api, job_id) for job_id in (cancelled, free)] == [("failed", 0), ("succeeded", 1)]
    assert world.sql("SELECT job_id FROM history_events") == [(free,)]
    with db.reading() as view:
        assert jobs.find(view, claimed) == held


def test_who_has_a_callback_has_a_message_too(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    ids = submit_notes(api, 2) + submit_notes(api, 1, callback_url=HOOK) + submit_notes(api, 1)
    assert messages() == [[ids[0], ids[1], ids[3]], [ids[2]]]
    run_together.run_together(ids)  # nobody publishes such a message; it would not lose the callback
    assert shown(api, ids[2]) == ("queued", 0) and messages() == [[ids[2]]]
    run_job.run_once(ids[2])
    assert world.count("deliveries") == 1 and len(told(world)) == 4


def test_who_was_not_as_it_was_seen_ends_nobody(api: FlaskClient, world: World) -> None:
    """The fence, should a database not hold what was read: none of the ends is written."""
    ids = submit_notes(api, 2)
    with pytest.raises(Exception, match="2 jobs were held, 1 of them"), db.transaction() as tx:
        held = at_once.hold_first(tx, ids)
        tx.execute(jobs._touch, {"job_id": ids[1]})
        moment = clock.now()
        ends = [at_once.Finished(job, "1", moment, moment, None) for job in held]
        at_once.succeed(tx, "w", ends, later(9) - moment)
    assert world.count("jobs", "status = 'queued' AND version = 0") == 2


def test_workers_whose_messages_overlap_run_each_job_once(api: FlaskClient, world: World) -> None:
    ids = submit_notes(api, 30)
    messages()
    calls = [lambda some=ids[begin:begin + 15]: run_together.run_together(some) for begin in (0, 5, 10, 15, 0, 15)]
    all_at_once(calls + [lambda one=job_id: run_job.run_once(one) for job_id in ids[::10]])
    for job_id in ids:
        if shown(api, job_id)[0] == "queued":  # both had passed it over, each for the other, which was interrupted
            run_job.run_once(job_id)
    assert len(told(world)) == 30 and set(told(world).values()) == {1} and world.count("outbox") == 0
    assert {shown(api, job_id) for job_id in ids} == {("succeeded", 1)} and nothing_is_wrong(world)


# --- a process that dies in the middle ---


def _die_at_the_third(environment: dict[str, str], ids: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    append, calls = notes.append_event, []

    def append_or_die(*arguments: Any) -> None:
        append(*arguments)
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    notes.append_event = append_or_die
    run_together.run_together(ids)


def test_who_kills_its_process_takes_no_attempt_from_the_others(api: FlaskClient, world: World) -> None:
    """As for a worker of an earlier version, which does not know such messages: the message is lost."""
    ids = submit_notes(api, 4)
    assert messages() == [ids]
    process = _processes.Process(target=_die_at_the_third, args=(dict(os.environ), ids))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert {shown(api, job_id) for job_id in ids} == {("queued", 0)} and not told(world)
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 2)
    memory: dict = {}
    assert [rescue_stalled.run_once(later(seconds), memory) for seconds in (60, 71)] == [0, 4]
    assert messages(later(71)) == [[job_id] for job_id in ids]  # whoever kills now counts its attempts
    for job_id in ids:
        run_job.run_once(job_id)
    assert {shown(api, job_id) for job_id in ids} == {("succeeded", 1)} and set(told(world).values()) == {1}


# --- locks ---


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_relays_that_mark_and_workers_that_settle_do_not_wait_for_each_other(api: FlaskClient, world: World) -> None:
    """Rows that were staged again lie in another order than their jobs."""
    ids = submit_notes(api, 60)
    messages()
    with db.transaction() as tx:
        for job_id in reversed(ids):
            outbox.settle(tx, states.RUN_JOB, job_id)
            outbox.stage(tx, states.RUN_JOB, job_id, "q:jobs2", clock.now(), time_limit_seconds=60, together="history")
    until = time.monotonic() + 2
    published, enough = [ids], threading.Event()

    def relays() -> None:
        while time.monotonic() < until:
            relay_outbox.drain(lambda *rows: published.append([row.target_id for row in rows]), now=lambda: later(60))

    def works() -> None:
        while time.monotonic() < until:
            with db.transaction() as tx:
                held = at_once.hold_first(tx, published[-1])
                moments = outbox.settle_all(tx, states.RUN_JOB, [job.id for job in held])
                run_together._stage_again(tx, held[::-1], moments, clock.now(), share=True)

    def clients() -> None:
        while time.monotonic() < until:
            cancel(another(api), ids.pop())
            enough.wait(0.05)

    all_at_once([relays, relays, works, works, works, clients])
    assert world.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0] == 0
    for message in messages(later(60)) + [ids]:
        run_together.run_together(message)
    assert world.count("outbox") == 0 and nothing_is_wrong(world)


# --- the relay's batch ---


@one_database
def test_a_batch_that_redis_refuses_is_published_later_and_nothing_is_parked(api: FlaskClient, world: World) -> None:
    ids = [submit(api, n=5)]
    assert relay_outbox.drain(publishing.publish, batch=publishing.in_one_go) == 1  # the queue is known from now on
    world.redis.delete("q:jobs2")
    ids += [submit(api, n=5) for _ in range(2)]
    world.redis.config_set("maxmemory", 1)
    try:
        assert relay_outbox.drain(publishing.publish, batch=publishing.in_one_go) == 0
    finally:
        world.redis.config_set("maxmemory", 0)
    assert world.redis.llen("q:jobs2") == 0
    assert world.sql("SELECT state, count(*), max(failures) FROM outbox GROUP BY state ORDER BY state") == [
        ("published", 1, 0), ("waiting", 2, 0)]
    soon = later(relay_outbox.AWAY_SECONDS + 1)
    assert relay_outbox.drain(publishing.publish, now=lambda: soon, batch=publishing.in_one_go) == 2
    assert [json.loads(text)["headers"]["argsrepr"] for text in reversed(world.redis.lrange("q:jobs2", 0, -1))] == [
        f"[{job_id!r}]" for job_id in ids[1:]]


@one_database
def test_a_row_that_cannot_be_published_leaves_the_rest_of_its_batch(api: FlaskClient, world: World) -> None:
    bad, good = submit(api, n=5), submit(api, n=6)

    def publish(row: outbox.Row) -> None:
        publishing.publish(row if row.target_id == good else outbox.Row(**{**vars(row), "target_id": object()}))

    assert relay_outbox.drain(publish, batch=publishing.in_one_go) == 1
    assert world.redis.llen("q:jobs2") == 1 and good in world.redis.lindex("q:jobs2", 0)
    assert world.sql("SELECT state, failures FROM outbox WHERE target_id = :bad", bad=bad) == [("waiting", 1)]


def test_a_message_that_cannot_be_published_is_taken_apart(api: FlaskClient, world: World) -> None:
    ids = submit_notes(api, 3)
    broker = Broker()

    def publish(*rows: outbox.Row) -> None:
        if ids[1] in [row.target_id for row in rows]:
            raise TypeError("cannot be encoded")
        broker.publish(*rows)

    for attempt in range(outbox.MAX_FAILURES):
        relay_outbox.drain(publish, now=lambda: later(10 * attempt))
    assert [target for _, target in broker.taken()] == [ids[0], ids[2]]
    assert world.sql("SELECT target_id FROM outbox WHERE state = 'parked'") == [(ids[1],)]
    assert relay() == []
