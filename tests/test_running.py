"""One attempt of one job: claim, run, end."""
from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from flask.testing import FlaskClient
from pydantic import BaseModel

from app import clock, db, jobs, kinds, waking
from tasks import celery, run_job
from tests.conftest import World, one_database
from tests.running import a_kind, die_in_mid_job, later, relay, run_to_end, submit
from tests.servers import wait_until
from tests.test_submitting import refuse_writing


def test_a_job_succeeds_with_its_result(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    document = api.get(f"/jobs/{job_id}").json
    assert document["status"] == "succeeded"
    assert document["result"] == {"n": 5, "count": 3}
    assert document["attempt"] == 1
    assert world.redis.hget(f"job:{job_id}", "status") == "succeeded"


def test_the_claim_is_written_before_the_work(api: FlaskClient, world: World) -> None:
    seen = []

    def look(input: Any, job: kinds.Job) -> None:
        seen.extend(world.sql("SELECT status, attempt, lease_until IS NOT NULL FROM jobs"))
        seen.append(world.redis.hget(f"job:{job.id}", "status"))
        seen.append(world.count("outbox"))

    with a_kind(look) as kind:
        run_job.run_once(submit(api, kind))
    assert seen == [("running", 1, 1), "running", 0]


def test_a_message_that_comes_twice_runs_the_job_once(api: FlaskClient, world: World) -> None:
    runs = []
    with a_kind(lambda input, job: runs.append(job.attempt)) as kind:
        job_id = submit(api, kind)
        assert run_job.run_once(job_id) is not None
        assert run_job.run_once(job_id) is None
    assert runs == [1]


def test_of_concurrent_workers_one_claims_the_job(api: FlaskClient, world: World) -> None:
    runs, barrier = [], threading.Barrier(8)

    def work(job_id: str) -> None:
        barrier.wait()
        run_job.run_once(job_id)

    with a_kind(lambda input, job: runs.append(job.attempt)) as kind:
        job_id = submit(api, kind)
        threads = [threading.Thread(target=work, args=(job_id,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert runs == [1]


def test_an_exception_is_tried_again_and_then_final(api: FlaskClient, world: World) -> None:
    def fail(input: Any, job: kinds.Job) -> None:
        raise LookupError(f"no luck in attempt {job.attempt}")

    with a_kind(fail) as kind:
        job_id = submit(api, kind)
        relay()
        assert run_job.run_once(job_id).status == "queued"
        assert api.get(f"/jobs/{job_id}").json["status"] == "queued"
        assert world.sql("SELECT state FROM outbox") == [("waiting",)]
        assert relay() == []  # not before its backoff
        after = run_to_end(job_id)
    assert (after.status, after.attempt) == ("failed", 3)
    document = api.get(f"/jobs/{job_id}").json
    assert document["error"] == {"code": "exception", "message": "LookupError: no luck in attempt 3"}
    assert "result" not in document


@pytest.mark.parametrize("function,code,attempts", [
    (lambda input, job: (_ for _ in ()).throw(kinds.Refused("not this one")), "refused", 1),
    (lambda input, job: (_ for _ in ()).throw(SoftTimeLimitExceeded()), "timeout", 3),
    (lambda input, job: (_ for _ in ()).throw(MemoryError()), "exception", 3),
    (lambda input, job: (_ for _ in ()).throw(SystemExit(1)), "exception", 3),
    (lambda input, job: (_ for _ in ()).throw(asyncio.CancelledError()), "exception", 3),
    (lambda input, job: (_ for _ in ()).throw(KeyboardInterrupt()), "exception", 3),
    (lambda input, job: float("nan"), "bad_result", 1),
    (lambda input, job: {1, 2}, "bad_result", 1),
    (lambda input, job: "\ud800", "bad_result", 1),
    (lambda input, job: "x" * (256 * 1024), "bad_result", 1),
    (lambda input, job: (_ for _ in ()).throw(ValueError("NUL \x00 and \ud800 " + "x" * 5000)), "exception", 3),
])
def test_each_bad_end_has_its_code(
    api: FlaskClient, world: World, function: Any, code: str, attempts: int,
) -> None:
    with a_kind(function) as kind:
        job_id = submit(api, kind)
        after = run_to_end(job_id)
    assert (after.status, after.error_code, after.attempt) == ("failed", code, attempts)
    assert len(api.get(f"/jobs/{job_id}").json["error"]["message"]) <= 1000


@pytest.mark.parametrize("value", [None, True, 0, "é\u2028\x00", [], {}, {"a": [1.0, {"b": None}]}, "x" * 262_142])
def test_a_result_is_any_json(api: FlaskClient, world: World, value: Any) -> None:
    with a_kind(lambda input, job: value) as kind:
        job_id = submit(api, kind)
        run_job.run_once(job_id)
    assert api.get(f"/jobs/{job_id}").json["result"] == value
    world.redis.flushall()
    assert api.get(f"/jobs/{job_id}").json["result"] == value


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_whose_text_is_broken_ends_like_any_other(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: (_ for _ in ()).throw(Broken()), max_attempts=1) as kind:
        assert run_to_end(submit(api, kind)).error_message == "Broken: (its text cannot be read)"


def test_an_attempt_that_was_lost_cannot_finish(api: FlaskClient, world: World) -> None:
    """The fence: a worker that was frozen for longer than its lease comes back to a job that another one has."""
    def frozen(input: Any, job: kinds.Job) -> str:
        if job.attempt == 1:
            with db.transaction() as tx:
                held = jobs.find(tx, job.id)
                assert jobs.requeue(tx, held) is not None
            assert run_job.run_once(job.id).result == '"second"'
            return "first"
        return "second"

    with a_kind(frozen) as kind:
        job_id = submit(api, kind)
        assert run_job.run_once(job_id) is None
    assert api.get(f"/jobs/{job_id}").json["result"] == "second"
    assert world.count("jobs", "attempt = 2") == 1


def test_a_job_that_is_released_runs_again_at_once_and_keeps_its_attempts(api: FlaskClient, world: World) -> None:
    released = []

    def work(input: Any, job: kinds.Job) -> str:
        if job.attempt < 3:
            released.extend(run_job.release_all(celery.NAME, clock.now()))
        return "done"

    with a_kind(work, max_attempts=1) as kind:
        job_id = submit(api, kind)
        relay()
        for _ in range(2):
            assert run_job.run_once(job_id) is None  # it was taken from this attempt
            assert api.get(f"/jobs/{job_id}").json["status"] == "queued"
            assert relay() == [("run_job", job_id)]
        assert run_job.run_once(job_id).result == '"done"'
    assert [job.attempt for job in released] == [1, 2]
    assert run_job.release_all(celery.NAME, clock.now()) == []


def test_an_attempt_that_was_lost_changes_nothing_while_the_next_one_runs(api: FlaskClient, world: World) -> None:
    """The fence is the attempt's number: both are of a job that is running."""
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    seen: list[Any] = []

    def work(input: Any, job: kinds.Job) -> str:
        if job.attempt == 2:
            (lease,) = world.sql("SELECT lease_until FROM jobs")
            moment = clock.now()
            for late in (
                lambda tx: jobs.succeed(tx, first, '"first"', moment, timedelta(1)),
                lambda tx: jobs.fail(tx, first, "crashed", "late", moment, timedelta(1)),
                lambda tx: jobs.requeue(tx, first), lambda tx: jobs.release(tx, first),
                lambda tx: jobs.extend_lease(tx, first, later(10**6), 7, 7),
            ):
                with db.transaction() as tx:
                    seen.append(late(tx))
            seen.append(run_job.finish(first, run_job.Success('"first"'), clock.now))
            assert world.sql("SELECT lease_until FROM jobs") == [lease]
        return "second"

    with a_kind(work, max_attempts=2) as kind:
        job_id = submit(api, kind, callback_url="http://127.0.0.1:9/")
        die_in_mid_job(job_id)
        with db.transaction() as tx:
            first = jobs.find(tx, job_id)
            jobs.requeue(tx, first)
        assert run_job.run_once(job_id).result == '"second"'
    assert seen == [None] * 6
    assert world.count("deliveries") == 1


def test_a_heartbeat_keeps_the_lease_for_as_long_as_the_job_runs(api: FlaskClient, world: World) -> None:
    world.set(LEASE_SECONDS=1)
    leases = set()

    def work(input: Any, job: kinds.Job) -> None:
        deadline = time.monotonic() + 20
        while len(leases) < 4 and time.monotonic() < deadline:
            leases.add(world.sql("SELECT lease_until FROM jobs")[0][0])
            job.progress(len(leases), 4)

    with a_kind(work) as kind:
        run_job.run_once(submit(api, kind))
    assert len(leases) == 4


def test_a_job_learns_that_its_attempt_is_lost(api: FlaskClient, world: World) -> None:
    world.set(LEASE_SECONDS=1)

    def work(input: Any, job: kinds.Job) -> None:
        with db.transaction() as tx:
            jobs.requeue(tx, jobs.find(tx, job.id))
        wait_until(job.cancelled)
        learned.append(job.attempt)

    learned: list[int] = []
    with a_kind(work) as kind:
        assert run_job.run_once(submit(api, kind)) is None
    assert learned == [1]


def test_progress_is_shown_while_running_and_gone_afterwards(api: FlaskClient, world: World) -> None:
    shown = []

    def work(input: Any, job: kinds.Job) -> None:
        job.progress(3, 10)
        shown.append(api.get(f"/jobs/{job.id}").json)

    with a_kind(work) as kind:
        job_id = submit(api, kind)
        run_job.run_once(job_id)
    assert shown[0]["progress"] == {"done": 3, "total": 10} and shown[0]["status"] == "running"
    assert "progress" not in api.get(f"/jobs/{job_id}").json


def test_the_end_that_the_database_refuses_is_an_ended_attempt(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    drop = refuse_writing(world, "jobs", "UPDATE", "NEW.status = 'succeeded'")
    after = run_job.run_once(job_id)
    assert (after.status, after.attempt) == ("queued", 1)
    world.sql(drop)
    assert run_to_end(job_id).status == "succeeded"


def test_the_end_and_what_follows_from_it_are_one_transaction(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    job_id = submit(api, n=5, callback_url="http://127.0.0.1:9/")
    drop = refuse_writing(world, "deliveries")
    assert run_job.run_once(job_id).status == "queued"
    assert world.count("deliveries") == 0
    world.sql(drop)
    world.redis.delete(waking.KEY)
    assert run_to_end(job_id).status == "succeeded"
    assert world.redis.llen(waking.KEY) == 1  # the callback goes at once
    assert (world.count("deliveries"), world.count("outbox", "task = 'deliver_webhook'")) == (1, 1)


def test_a_worker_without_the_kind_leaves_the_job_to_another(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: "done") as kind:
        job_id = submit(api, kind)
        known = kinds._registered.pop(kind)
        for _ in range(5):  # more than its attempts: they do not count
            assert run_job.run_once(job_id).status == "queued"
        assert relay() == [] and relay(later(60)) == [("run_job", job_id)]  # not at once again
        kinds._registered[kind] = known
        assert run_to_end(job_id).status == "succeeded"


def test_a_kind_that_no_worker_has_known_for_long_is_refused(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: "done", max_attempts=1) as kind:
        job_id = submit(api, kind)
        del kinds._registered[kind]
        after = run_job.run_once(job_id, now=lambda: later(run_job._UNKNOWN_SECONDS + 1))
        kinds._registered[kind] = None
    assert (after.status, after.error_code) == ("failed", "refused")


# --- notes: the history and the job's success are one commit ---


def submit_note(api: FlaskClient) -> str:
    return api.post("/notes", json={"text": "x"}).json["job_id"]


def events(api: FlaskClient) -> list[dict]:
    return api.get("/notes/1/events").json["events"]


def test_a_history_is_written_once(api: FlaskClient, world: World) -> None:
    job_id = submit_note(api)
    assert events(api) == []
    run_job.run_once(job_id)
    run_job.run_once(job_id)
    assert [(event["kind"], event["job_id"]) for event in events(api)] == [("created", job_id)]
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"


def test_a_history_that_cannot_be_written_leaves_the_note(api: FlaskClient, world: World) -> None:
    job_id = submit_note(api)
    drop = refuse_writing(world, "history_events")
    assert run_job.run_once(job_id).status == "queued"
    assert api.get("/notes/1").status_code == 200 and events(api) == []
    world.sql(drop)
    run_job.run_once(job_id)
    assert len(events(api)) == 1
    assert api.get(f"/jobs/{job_id}").json["attempt"] == 2


@pytest.mark.parametrize("table,when,condition", [
    ("jobs", "UPDATE", "NEW.status = 'succeeded'"), ("deliveries", "INSERT", ""),
])
def test_a_final_update_that_fails_undoes_the_history(
    api: FlaskClient, world: World, table: str, when: str, condition: str,
) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    job_id = api.post("/notes", json={"text": "x", "callback_url": "http://127.0.0.1:9/"}).json["job_id"]
    drop = refuse_writing(world, table, when, condition)
    assert run_job.run_once(job_id).status == "queued"
    assert events(api) == []
    world.sql(drop)
    run_job.run_once(job_id)
    assert len(events(api)) == 1


def test_a_history_is_undone_when_the_attempt_was_lost(api: FlaskClient, world: World) -> None:
    def lose(input: Any, job: kinds.Job, tx: Any) -> None:
        jobs.requeue(tx, jobs.find(tx, job.id))
        tx.exec_driver_sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")

    with a_kind(lose, transactional=True) as kind:
        assert run_job.run_once(submit(api, kind)) is None
    assert world.count("notes") == 0
    assert world.sql("SELECT status FROM jobs") == [("running",)]


def test_a_transactional_kind_that_raises_leaves_none_of_its_rows(api: FlaskClient, world: World) -> None:
    def write_and_raise(input: Any, job: kinds.Job, tx: Any) -> None:
        tx.exec_driver_sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")
        if job.attempt < 2:
            raise ValueError("halfway")

    with a_kind(write_and_raise, transactional=True) as kind:
        job_id = submit(api, kind)
        assert run_job.run_once(job_id).status == "queued"
        assert world.count("notes") == 0
        assert run_job.run_once(job_id).status == "succeeded"
        assert world.count("notes") == 1


def test_a_finish_waits_for_a_database_that_is_locked(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    """The result of a long job is not thrown away because the database was busy for a moment."""
    monkeypatch.setattr(run_job, "_FINISH_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(db, "LOCK_WAIT_SECONDS", 0.2)
    db.dispose()
    released, held, runs = threading.Event(), threading.Event(), []

    def hold() -> None:
        with db.transaction() as tx:
            tx.exec_driver_sql("UPDATE jobs SET owner = owner")
            held.set()
            released.wait(20)

    def work(input: Any, job: kinds.Job) -> str:
        runs.append(job.attempt)
        blocker.start()
        assert held.wait(20)
        threading.Timer(1, released.set).start()
        return "done"

    blocker = threading.Thread(target=hold)
    with a_kind(work) as kind:
        after = run_job.run_once(submit(api, kind))
    blocker.join()
    assert after.status == "succeeded" and runs == [1]


@one_database
def test_a_job_is_refused_with_what_its_model_says(api: FlaskClient, world: World) -> None:
    class Point(BaseModel):
        x: int
        name: str = "origin"

    with a_kind(lambda input, job: input.x, input=Point) as kind:
        for members, pointer in (({}, "#/x"), ({"x": "1"}, "#/x"), ({"x": True}, "#/x"), ({"x": 1, "y": 2}, "#/y"),
                                 ({"x": 1.5}, "#/x"), ({"x": 1, "name": None}, "#/name")):
            answer = api.post("/jobs", json={"kind": kind, **members})
            assert answer.status_code == 422
            assert answer.json["errors"][0]["pointer"] == pointer
    assert world.count("jobs") == 0


@one_database
def test_a_finished_job_expires_after_its_time_to_live(api: FlaskClient, world: World) -> None:
    world.set(RESULT_TTL_SECONDS=100)
    job_id = submit(api, n=5)
    before = clock.now()
    after = run_job.run_once(job_id)
    assert timedelta(seconds=100) <= after.expires_at - before <= timedelta(seconds=110)
    assert 0 < world.redis.pttl(f"job:{job_id}") <= 100_000
