"""POST /jobs/<id>/cancel: a queued job ends at once; a running one is asked, and has no other end from then on."""
from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from flask.testing import FlaskClient
from sqlalchemy.exc import OperationalError

from app import clock, db, jobs, kinds, outbox, redis_client, waking
from app.api import create_app
from tasks import attempt, celery, interrupting, prune_expired, relay_outbox, rescue_stalled, run_job
from tests.asking import a_checked_kind, all_at_once, another, cancel, deliver_all, nothing_is_wrong, problem
from tests.conftest import World, one_database
from tests.receiver import Receiver
from tests.running import die_in_mid_job, later, relay, run_to_end, submit
from tests.servers import wait_until

CANCELLED = {"code": "cancelled", "message": "cancelled on request"}


def ended_cancelled(api: FlaskClient, world: World, job_id: str, attempts: int | None = None) -> bool:
    """What every cancelled job is in the end: nothing of it is left to do but its callback, and that once."""
    job = api.get(f"/jobs/{job_id}").json
    assert (job["status"], job["error"]) == ("failed", CANCELLED) and attempts in (None, job["attempt"])
    assert "result" not in job and "progress" not in job and job["finished_at"] < job["expires_at"]
    assert run_job.run_once(job_id) is None
    assert world.sql("SELECT count(*) FROM outbox WHERE task = 'run_job' AND target_id = :id", id=job_id) == [(0,)]
    told = world.sql("SELECT count(*) FROM deliveries WHERE job_id = :id", id=job_id)
    return told == [(1 if "callback" in job else 0,)]


# --- queued ---


def test_a_queued_job_ends_at_once_and_tells_so(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    world.redis.delete(waking.KEY)
    answer = cancel(api, job_id)
    assert answer.status_code == 200 and "Retry-After" not in answer.headers
    assert answer.headers["Cache-Control"] == "no-store" and answer.content_type == "application/json"
    job = answer.json
    assert (job["status"], job["error"], job["attempt"], "started_at" in job) == ("failed", CANCELLED, 0, False)
    assert job["callback"].keys() == {"status", "attempts", "next_attempt_at"}
    assert api.get(f"/jobs/{job_id}").json == job
    assert world.redis.hget(f"job:{job_id}", "status") == "failed"
    assert world.redis.llen(waking.KEY) == 1  # the callback goes at once
    assert deliver_all() == []
    (hook,) = receiver.hooks
    told = json.loads(hook.body)
    assert (told.pop("type"), told.pop("timestamp")) == ("job.failed", job["finished_at"])
    assert told == {key: value for key, value in job.items() if key != "callback"}
    assert ended_cancelled(api, world, job_id, attempts=0) and nothing_is_wrong(world)


def publish(job_id: str) -> None:
    assert relay() == [("run_job", job_id)]


def claim_for_publishing(job_id: str) -> None:
    with db.transaction() as tx:
        assert outbox.claim(tx, "a relay", clock.now(), later(15), 10)


def park(job_id: str) -> None:
    def refuse(row: outbox.Row) -> None:
        raise TypeError

    for number in range(outbox.MAX_FAILURES):
        relay_outbox.drain(refuse, now=lambda: later(10 * number))


@pytest.mark.parametrize("before", [publish, claim_for_publishing, park], ids=lambda before: before.__name__)
def test_a_message_that_is_on_its_way_runs_nothing(
    api: FlaskClient, world: World, before: Callable[[str], None],
) -> None:
    runs: list[int] = []
    with a_checked_kind(lambda input, job: runs.append(job.attempt)) as name:
        job_id = submit(api, name)
        before(job_id)
        assert cancel(api, job_id).json["status"] == "failed"
        assert relay(later(1000)) == [] and run_job.run_once(job_id) is None and runs == []
    assert ended_cancelled(api, world, job_id, attempts=0) and nothing_is_wrong(world)


def test_a_cancellation_while_the_relay_publishes_leaves_no_row(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    answers: list[int] = []
    assert relay_outbox.drain(lambda row: answers.append(cancel(another(api), row.target_id).status_code)) == 1
    assert answers == [200] and world.count("outbox") == 0
    assert ended_cancelled(api, world, job_id, attempts=0)


def test_a_job_that_waits_for_its_next_attempt_ends_at_once(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    with a_checked_kind(lambda input, job: 1 / 0) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        assert run_job.run_once(job_id).status == "queued"
        assert cancel(api, job_id).json["status"] == "failed"
        assert relay(later(1000))[0][0] == "deliver_webhook"
        assert ended_cancelled(api, world, job_id, attempts=1)
    assert "started_at" in api.get(f"/jobs/{job_id}").json


def test_without_redis_a_job_is_cancelled_all_the_same(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    redis_client._away_until = float("inf")
    assert cancel(api, job_id).json["status"] == "failed"
    assert api.get(f"/jobs/{job_id}").json["error"] == CANCELLED
    redis_client._away_until = 0.0


def test_the_note_of_a_cancelled_history_stays(api: FlaskClient, world: World) -> None:
    note = api.post("/notes", json={"text": "x"}).json
    assert cancel(api, note["job_id"]).json["note_id"] == note["id"]
    assert ended_cancelled(api, world, note["job_id"], attempts=0)
    assert api.get(f"/notes/{note['id']}").status_code == 200
    assert api.get(f"/notes/{note['id']}/events").json == {"events": []} and nothing_is_wrong(world)


def test_a_repeated_submission_of_a_cancelled_job_gets_its_first_answer(api: FlaskClient, world: World) -> None:
    first, again = (functools.partial(api.post, "/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
                    for _ in range(2))
    accepted = first()
    cancel(api, accepted.json["job_id"])
    replayed = again()
    assert (replayed.status_code, replayed.data) == (202, accepted.data)
    assert replayed.headers["Location"] == accepted.headers["Location"] and world.count("jobs") == 1
    assert replayed.headers["Idempotent-Replayed"] == "true"
    assert ended_cancelled(api, world, accepted.json["job_id"], attempts=0)


# --- running ---


def thrown(error: BaseException) -> Any:
    raise error


AFTERWARDS: dict[str, Callable[[], Any]] = {
    "returns": lambda: "a result", "returns no JSON": lambda: {1}, "raises": lambda: thrown(LookupError()),
    "refuses": lambda: thrown(kinds.Refused("no")), "exits": lambda: thrown(SystemExit(1)),
    "is interrupted": lambda: thrown(SoftTimeLimitExceeded())}


@pytest.mark.parametrize("afterwards", AFTERWARDS.values(), ids=AFTERWARDS)
def test_whatever_the_function_does_afterwards_the_job_is_cancelled(
    api: FlaskClient, world: World, receiver: Receiver, afterwards: Callable[[], Any],
) -> None:
    def work(input: Any, job: kinds.Job) -> Any:
        job.progress(1, 2)
        answer = cancel(another(api), job.id)
        assert (answer.status_code, answer.json["status"]) == (200, "running")
        assert "Retry-After" in answer.headers and "error" not in answer.json
        assert answer.json["callback"] == {"status": "pending", "attempts": 0}
        return afterwards()

    with a_checked_kind(work, max_attempts=3) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        after = run_job.run_once(job_id)
    assert (after.status, after.error_code) == ("failed", "cancelled")
    assert deliver_all() == [] and len(receiver.hooks) == 1
    assert ended_cancelled(api, world, job_id, attempts=1) and nothing_is_wrong(world)


def test_a_running_job_learns_of_its_cancellation(api: FlaskClient, world: World) -> None:
    took: list[float] = []

    def work(input: Any, job: kinds.Job) -> None:
        assert not job.cancelled()
        cancel(another(api), job.id)
        began = time.monotonic()
        wait_until(job.cancelled)
        took.append(time.monotonic() - began)

    with a_checked_kind(work) as name:
        job_id = submit(api, name)
        run_job.run_once(job_id)
    assert took[0] < 4  # a second, on a machine that is not busy; the lease's heartbeat alone would take 5
    assert ended_cancelled(api, world, job_id, attempts=1)


def test_the_rows_of_a_cancelled_transactional_job_go(api: FlaskClient, world: World, receiver: Receiver) -> None:
    def write(input: Any, job: kinds.Job, tx: Any) -> str:
        tx.exec_driver_sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")
        return "a result"

    with a_checked_kind(write, transactional=True) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        held = run_job.claim(job_id, clock.now())
        assert cancel(api, job_id).json["status"] == "running"
        assert run_job.run(held, clock.now, run_job.finish).error_code == "cancelled"
    assert world.count("notes") == 0 and ended_cancelled(api, world, job_id, attempts=1)


def test_a_cancellation_in_the_middle_of_a_transactional_job_undoes_it(api: FlaskClient, world: World) -> None:
    if world.dialect == "sqlite":
        return  # its one writer is the function: the cancellation waits for its end

    def write(input: Any, job: kinds.Job, tx: Any) -> None:
        tx.exec_driver_sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")
        assert cancel(another(api), job.id).json["status"] == "running"

    with a_checked_kind(write, transactional=True) as name:
        job_id = submit(api, name)
        run_job.run_once(job_id)
    assert world.count("notes") == 0 and ended_cancelled(api, world, job_id, attempts=1)


def test_cancelling_again_changes_nothing(api: FlaskClient, world: World, receiver: Receiver) -> None:
    def asked() -> Any:
        return world.sql("SELECT cancel_requested_at, version FROM jobs")

    def work(input: Any, job: kinds.Job) -> None:
        cancel(another(api), job.id)
        first = asked()
        again = cancel(another(api), job.id)
        assert (again.status_code, again.json["status"]) == (200, "running") and asked() == first

    with a_checked_kind(work) as name:
        ran = submit(api, name, callback_url=receiver.url)
        run_job.run_once(ran)
    waited = submit(api, n=5, callback_url=receiver.url)
    cancel(api, waited)
    for job_id in (ran, waited):
        before = world.sql("SELECT * FROM jobs WHERE id = :id", id=job_id)
        answer = cancel(api, job_id)
        assert (answer.status_code, answer.json) == (200, api.get(f"/jobs/{job_id}").json)
        assert world.sql("SELECT * FROM jobs WHERE id = :id", id=job_id) == before
    assert world.count("deliveries") == 2


# --- refused ---


def test_what_has_ended_otherwise_is_not_cancelled(api: FlaskClient, world: World) -> None:
    with a_checked_kind(lambda input, job: 1 / 0, max_attempts=1) as name:
        ended = [submit(api, n=5), submit(api, name)]
        for job_id in ended:
            run_to_end(job_id)
    before = world.sql("SELECT * FROM jobs")
    for job_id in ended:
        assert problem(cancel(api, job_id)) == (409, "finished")
    assert world.sql("SELECT * FROM jobs") == before


def test_whose_job_it_is_not_cannot_cancel_it(world: World) -> None:
    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    api = create_app().test_client()
    ada, bob = ({"Authorization": f"Bearer secret-{letter}"} for letter in "ab")
    job_id = api.post("/jobs", json={"n": 5}, headers=ada).json["job_id"]
    assert problem(cancel(api, job_id, headers=bob)) == (404, "not-found")
    assert problem(cancel(api, job_id)) == (401, "unauthorized")
    assert api.get(f"/jobs/{job_id}", headers=ada).json["status"] == "queued" and relay() == [("run_job", job_id)]
    assert cancel(api, job_id, headers=ada).status_code == 200
    assert problem(cancel(api, job_id, headers=bob)) == (404, "not-found")


@one_database
@pytest.mark.parametrize("job_id", ["x", "%00", "0190b2a4-0000-7000-8000-000000000000", "1" * 5000, "é"])
def test_an_unknown_job_cannot_be_cancelled(api: FlaskClient, world: World, job_id: str) -> None:
    assert problem(cancel(api, job_id)) == (404, "not-found")


def test_an_expired_job_cannot_be_cancelled(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    cancel(api, job_id)
    world.sql("UPDATE jobs SET expires_at = finished_at")
    assert problem(cancel(api, job_id)) == (410, "expired")
    assert prune_expired.run_once(later(1)) == 1
    gone = cancel(api, job_id)
    assert problem(gone) == (410, "expired") and gone.json["job_status"] == "failed"


@one_database
def test_a_cancellation_is_a_post(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = api.open(f"/jobs/{job_id}/cancel", method=method)
        assert problem(answer) == (405, "method-not-allowed") and "POST" in answer.headers["Allow"]
    assert api.get(f"/jobs/{job_id}").json["status"] == "queued"


# --- workers that die, freeze, stop, or do not know the kind ---


def test_a_cancelled_job_whose_worker_died_is_not_tried_again(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    die_in_mid_job(job_id)
    assert cancel(api, job_id).json["status"] == "running"
    assert rescue_stalled.run_once(later(31), {}) == 1
    assert ended_cancelled(api, world, job_id, attempts=1)
    assert deliver_all(later(32)) == [] and len(receiver.hooks) == 1


def test_a_worker_that_was_frozen_cannot_finish_what_was_cancelled(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    def frozen(input: Any, job: kinds.Job) -> str:
        cancel(another(api), job.id)
        assert rescue_stalled.run_once(later(31), {}) == 1
        return "a result"

    with a_checked_kind(frozen) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        assert run_job.run_once(job_id) is None
    assert ended_cancelled(api, world, job_id, attempts=1)


def test_a_worker_that_stops_ends_its_cancelled_jobs_and_releases_the_others(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    stopped: list[tuple[str, str]] = []

    def work(input: Any, job: kinds.Job) -> None:
        if not stopped:
            die_in_mid_job(other)
            cancel(another(api), job.id)
            stopped.extend((job.id, job.status) for job in run_job.release_all(celery.NAME, clock.now()))

    with a_checked_kind(work) as name:
        job_id, other = submit(api, name, callback_url=receiver.url), submit(api, name)
        assert run_job.run_once(job_id) is None
        assert sorted(stopped) == sorted([(job_id, "failed"), (other, "queued")])
        assert deliver_all() == [other] and run_job.run_once(other).status == "succeeded"
    assert len(receiver.hooks) == 1 and ended_cancelled(api, world, job_id, attempts=1)


def test_a_worker_without_the_kind_does_not_hand_on_what_was_cancelled(api: FlaskClient, world: World) -> None:
    moments: list[int] = []

    def now() -> Any:
        moments.append(1)
        if len(moments) == 2:  # it is running, and about to be left to others
            cancel(another(api), job_id)
        return clock.now()

    with a_checked_kind(lambda input, job: "done") as name:
        job_id = submit(api, name)
        known = kinds._registered.pop(name)
        assert run_job.run_once(job_id, now).error_code == "cancelled"
        kinds._registered[name] = known
    assert ended_cancelled(api, world, job_id, attempts=1)


# --- functions that do not stop ---


def watch_enforcement(world: World, monkeypatch: Any) -> list[tuple[str, str]]:
    """What is done to a function that does not stop, each with the job's status at that moment; without waiting."""
    done: list[tuple[str, str]] = []

    def note(what: str) -> None:
        done.append((what, world.sql("SELECT status FROM jobs")[0][0]))

    world.set(CANCEL_GRACE_SECONDS="0")
    monkeypatch.setattr(attempt, "KILL_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(attempt, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(interrupting, "interrupt", lambda: note("interrupted"))
    monkeypatch.setattr(interrupting, "kill", lambda: note("killed"))
    return done


def test_a_function_that_does_not_stop_is_interrupted_then_ended_then_killed(
    api: FlaskClient, world: World, receiver: Receiver, monkeypatch: Any,
) -> None:
    done = watch_enforcement(world, monkeypatch)

    def deaf(input: Any, job: kinds.Job) -> str:
        cancel(another(api), job.id)
        wait_until(lambda: len(done) >= 2)
        return "a result"

    with a_checked_kind(deaf) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        assert run_job.run_once(job_id) is None
    assert done[:2] == [("interrupted", "running"), ("killed", "failed")]
    assert ended_cancelled(api, world, job_id, attempts=1) and nothing_is_wrong(world)


def test_a_function_that_stops_in_time_is_left_alone(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    done = watch_enforcement(world, monkeypatch)
    world.set(CANCEL_GRACE_SECONDS="60")

    def work(input: Any, job: kinds.Job) -> None:
        cancel(another(api), job.id)
        wait_until(job.cancelled)
        time.sleep(0.1)

    with a_checked_kind(work) as name:
        job_id = submit(api, name)
        run_job.run_once(job_id)
    assert done == [] and ended_cancelled(api, world, job_id, attempts=1)


def test_a_function_is_killed_only_once_its_end_is_written(
    api: FlaskClient, world: World, monkeypatch: Any,
) -> None:
    """The database is away at that moment: it is asked again."""
    done = watch_enforcement(world, monkeypatch)
    tries: list[int] = []
    end = jobs.end_cancelled

    def away_at_first(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OperationalError("UPDATE", None, ConnectionError("away"))
        return end(*arguments)

    monkeypatch.setattr(jobs, "end_cancelled", away_at_first)

    def deaf(input: Any, job: kinds.Job) -> None:
        cancel(another(api), job.id)
        wait_until(lambda: len(done) >= 2)

    with a_checked_kind(deaf) as name:
        job_id = submit(api, name)
        run_job.run_once(job_id)
    assert done[:2] == [("interrupted", "running"), ("killed", "failed")] and len(tries) >= 3
    assert ended_cancelled(api, world, job_id, attempts=1)


def test_nobody_is_killed_without_having_been_interrupted(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    """A process that stood still for longer than all of its grace learns of the cancellation when it goes on."""
    done = watch_enforcement(world, monkeypatch)
    monkeypatch.setattr(attempt, "KILL_AFTER_SECONDS", 0.3)
    look, looked = attempt.Attempt._look, threading.Event()

    def look_and_stand_still(self: attempt.Attempt) -> None:
        look(self)
        looked.set()
        time.sleep(0.5)

    monkeypatch.setattr(attempt.Attempt, "_look", look_and_stand_still)

    def deaf(input: Any, job: kinds.Job) -> None:
        assert looked.wait(20)
        cancel(another(api), job.id)
        wait_until(lambda: len(done) >= 2)

    with a_checked_kind(deaf) as name:
        run_job.run_once(submit(api, name))
    assert [what for what, _ in done[:2]] == ["interrupted", "killed"]


# --- races: many of each at one moment ---

JOBS = 8
CANCELS = 3  # of each job


@pytest.mark.parametrize("moment", ["it begins", "it ends", "it is tried again"])
def test_of_cancellations_and_a_worker_at_one_moment_one_wins(
    api: FlaskClient, world: World, receiver: Receiver, moment: str,
) -> None:
    near: dict[str, threading.Event] = defaultdict(threading.Event)

    def work(input: Any, job: kinds.Job) -> str:
        near[job.id].set()
        time.sleep(random.uniform(0, 0.02))
        if moment == "it is tried again":
            raise LookupError
        return "a result"

    def stop(job_id: str) -> Any:
        assert moment == "it begins" or near[job_id].wait(20)
        time.sleep(random.uniform(0, 0.04))
        return cancel(another(api), job_id)

    with a_checked_kind(work) as name:
        ids = [submit(api, name, callback_url=receiver.url) for _ in range(JOBS)]
        calls = [functools.partial(run_job.run_once, job_id) for job_id in ids]
        answers = all_at_once(calls + [functools.partial(stop, job_id) for job_id in ids * CANCELS])[JOBS:]
        for place, job_id in enumerate(ids):
            cancelled = api.get(f"/jobs/{job_id}").json["status"] == "failed"
            assert cancelled or moment != "it is tried again"
            assert [answer.status_code for answer in answers[place::JOBS]] == [200 if cancelled else 409] * CANCELS
            assert not cancelled or ended_cancelled(api, world, job_id)
    assert deliver_all() == [] and world.count("outbox") == 0
    assert sorted(json.loads(hook.body)["job_id"] for hook in receiver.hooks) == sorted(ids)
    assert nothing_is_wrong(world)


@one_database
def test_asking_a_job_to_stop_leaves_its_progress_in_the_view(api: FlaskClient) -> None:
    def work(input: Any, job: kinds.Job) -> None:
        job.progress(3, 10)
        cancel(another(api), job.id)
        assert another(api).get(f"/jobs/{job.id}").json["progress"] == {"done": 3, "total": 10}

    with a_checked_kind(work) as kind:
        run_job.run_once(submit(api, kind))
