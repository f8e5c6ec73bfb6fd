"""Callbacks: signed, retried by columns in SQL, every try a row, never at the job's expense."""
from __future__ import annotations

import contextlib
import itertools
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy.exc import OperationalError

from app import clock, db, deliveries, redis_client, states, turns, waking
from tasks import deliver_webhook, rescue_stalled, run_job, threads
from tasks.egress import Answer
from tests import receiver as receivers
from tests.conftest import World, one_database
from tests.receiver import Receiver
from tests.running import Crash, a_kind, finish, later, relay, submit
from tests.servers import wait_until


def test_a_finished_job_is_told_to_its_receiver(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery_id = finish(api, receiver.url + "/hook?x=1")
    assert relay()[-1] == ("deliver_webhook", delivery_id)
    deliver_webhook.run_once(delivery_id)
    (hook,) = receiver.hooks
    told = json.loads(hook.body)
    job = api.get(f"/jobs/{told['job_id']}").json
    assert hook.path == "/hook?x=1" and hook.headers["content-type"] == "application/json"
    assert job.pop("callback") == {"status": "delivered", "attempts": 1, "last_response": 204}
    assert (told.pop("type"), told.pop("timestamp")) == ("job.succeeded", job["finished_at"])
    assert told == job


def test_a_callback_never_comes_before_the_state_can_be_read(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    """The worker's write to the view was lost, and what it showed before still stands."""
    job_id = submit(api, n=5, callback_url=receiver.url)
    redis_client._away_until = float("inf")
    run_job.run_once(job_id)
    (delivery_id,) = world.sql("SELECT id FROM deliveries")[0]
    assert deliver_webhook.run_once(delivery_id) is None  # Redis is still away: it steps back, no attempt is used
    assert world.sql("SELECT state, attempts FROM deliveries") == [("pending", 0)]
    redis_client._away_until = 0.0
    assert api.get(f"/jobs/{job_id}").json["status"] == "queued"  # stale, for seconds
    read: list[str] = []

    def respond(handler: Any, count: int) -> None:
        read.append(api.get(f"/jobs/{job_id}").json["status"])
        receivers.status(204)(handler, count)

    receiver.respond = respond
    assert deliver_webhook.run_once(delivery_id).state == "delivered"
    assert read == ["succeeded"]


def test_without_redis_a_callback_waits_until_stale_states_are_forgotten(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    delivery_id = finish(api, receiver.url)
    redis_client._away_until = float("inf")
    assert deliver_webhook.run_once(delivery_id) is None
    assert deliver_webhook.run_once(delivery_id, now=lambda: later(11)).state == "delivered"
    redis_client._away_until = 0.0


def test_a_failed_job_is_told_too(api: FlaskClient, world: World, receiver: Receiver) -> None:
    with a_kind(lambda input, job: float("nan")) as kind:
        deliver_webhook.run_once(finish(api, receiver.url, kind=kind))
    told = json.loads(receiver.hooks[0].body)
    assert (told["type"], told["status"], told["error"]["code"]) == ("job.failed", "failed", "bad_result")


def test_a_failing_callback_waits_in_sql_and_never_changes_the_job(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    receiver.respond = receivers.status(503)
    delivery_id = finish(api, receiver.url)
    before = api.get(f"/jobs/{job_of(world)}").json
    ids, bodies = set(), set()
    for attempt, wait in ((1, 5), (2, 300), (3, None)):
        moment = later(1000 * attempt)
        after = deliver_webhook.run_once(delivery_id, now=lambda: moment)
        assert after.attempts == attempt and after.last_response == 503
        if wait is None:
            assert after.state == "exhausted" and world.count("outbox") == 0
        else:
            assert after.state == "pending"
            assert 0.8 * wait <= (after.next_attempt_at - moment).total_seconds() <= 1.2 * wait
            assert deliver_webhook.run_once(delivery_id, now=lambda: moment) is None  # not due yet
            assert relay(after.next_attempt_at - timedelta(seconds=1)) == []
            assert relay(after.next_attempt_at) == [("deliver_webhook", delivery_id)]
    for hook in receiver.hooks:
        ids.add(hook.headers["webhook-id"])
        bodies.add(hook.body)
    assert ids == {delivery_id} and len(bodies) == 1
    job = api.get(f"/jobs/{job_of(world)}").json
    assert job.pop("callback") == {"status": "exhausted", "attempts": 3, "last_response": 503}
    before.pop("callback")
    assert job == before
    rows = api.get(f"/jobs/{job_of(world)}/deliveries").json["deliveries"]
    assert [(row["attempt"], row["response_code"]) for row in rows] == [(1, 503), (2, 503), (3, 503)]


def job_of(world: World) -> str:
    return world.sql("SELECT id FROM jobs")[0][0]


def test_a_try_that_died_is_a_row_and_another_one_follows(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    delivery_id = finish(api, receiver.url)

    def die(*_: Any) -> Answer:
        raise Crash

    with pytest.raises(Crash):
        deliver_webhook.run_once(delivery_id, post=die)
    assert deliver_webhook.run_once(delivery_id) is None  # it may still be under way
    assert rescue_stalled.run_once(later(20), {}) == 0
    assert rescue_stalled.run_once(later(31), {}) == 1
    assert world.sql("SELECT state, attempts FROM deliveries") == [("pending", 1)]
    assert deliver_webhook.run_once(delivery_id, now=lambda: later(60)).state == "delivered"
    rows = api.get(f"/jobs/{job_of(world)}/deliveries").json["deliveries"]
    assert [(row["attempt"], row["response_code"]) for row in rows] == [(1, None), (2, 204)]
    assert rows[0]["error"].startswith("interrupted")


def test_an_answer_that_came_while_the_database_was_away_is_not_forgotten(
    api: FlaskClient, world: World, receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
) -> None:
    delivery_id, really, asked = finish(api, receiver.url), deliveries.record, itertools.count()
    monkeypatch.setattr(deliver_webhook, "_STEP_BACK_SECONDS", 0.01)

    def record(*arguments: Any) -> Any:
        if next(asked) < 3:
            raise OperationalError("UPDATE", None, TimeoutError("held by another writer"))
        return really(*arguments)

    monkeypatch.setattr(deliveries, "record", record)
    assert deliver_webhook.run_once(delivery_id).state == "delivered"
    assert len(receiver.hooks) == 1 and world.sql("SELECT response_code FROM delivery_attempts") == [(204,)]


def test_a_sender_that_was_frozen_records_nothing(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery_id = finish(api, receiver.url)

    def freeze(*_: Any) -> Answer:
        rescue_stalled.run_once(later(31), {})
        assert deliver_webhook.run_once(delivery_id, now=lambda: later(60)).state == "delivered"
        return Answer(500, None, b"")

    assert deliver_webhook.run_once(delivery_id, post=freeze) is None
    assert world.sql("SELECT state, attempts, last_response FROM deliveries") == [("delivered", 2, 204)]


def test_a_frozen_sender_does_not_end_the_try_of_another(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    delivery_id = finish(api, receiver.url)

    def freeze(*_: Any) -> Answer:
        rescue_stalled.run_once(later(31), {})
        with db.transaction() as tx:
            known = deliveries.find(tx, delivery_id)
            assert deliveries.claim(tx, known, later(60), later(90), 4, states.WELL).attempts == 2
        return Answer(204, None, b"")

    assert deliver_webhook.run_once(delivery_id, post=freeze) is None
    assert world.sql("SELECT state, attempts FROM deliveries") == [("sending", 2)]
    assert world.count("delivery_attempts", "response_code IS NOT NULL") == 0


def test_of_concurrent_senders_one_makes_the_attempt(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery_id, barrier = finish(api, receiver.url), threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        deliver_webhook.run_once(delivery_id)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.hooks) == 1


def test_a_busy_hosts_callbacks_wait_without_messages_and_in_order(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    world.set(CALLBACK_PER_HOST=1)
    first, second, third = (finish(api, receiver.url) for _ in range(3))

    def post(*_: Any) -> Answer:
        for waiting in (third, second):
            assert deliver_webhook.run_once(waiting) is None
        assert world.count("outbox", "task = 'deliver_webhook'") == 0
        world.redis.delete(waking.KEY)
        return Answer(204, None, b"")

    assert deliver_webhook.run_once(first, post=post).state == "delivered"
    assert world.sql("SELECT DISTINCT attempts FROM deliveries WHERE state = 'pending'") == [(0,)]
    assert [row for row in relay() if row[0] == "deliver_webhook"] == [("deliver_webhook", second)]
    assert world.redis.llen(waking.KEY) == 1
    assert deliver_webhook.run_once(second).state == "delivered"
    assert [row for row in relay() if row[0] == "deliver_webhook"] == [("deliver_webhook", third)]


def test_no_host_gets_more_attempts_at_a_time_than_allowed(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    deliver_webhook.run_once(finish(api, receiver.url))  # an endpoint that answers
    ids = [finish(api, receiver.url) for _ in range(12)]
    barrier, let_go, lock = threading.Barrier(12), threading.Event(), threading.Lock()
    under_way: list[int] = [0]
    most: list[int] = [0]

    def post(*_: Any) -> Answer:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        let_go.wait(20)
        with lock:
            under_way[0] -= 1
        return Answer(204, None, b"")

    refused: list[str] = []

    def work(delivery_id: str) -> None:
        barrier.wait()
        if deliver_webhook.run_once(delivery_id, post=post) is None:
            refused.append(delivery_id)

    threads = [threading.Thread(target=work, args=(delivery_id,)) for delivery_id in ids]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(refused) == 8)
    let_go.set()
    for thread in threads:
        thread.join()
    assert most == [4]
    while waiting := [target for task, target in relay() if task == "deliver_webhook"]:
        for delivery_id in waiting:
            deliver_webhook.run_once(delivery_id)
    assert world.sql("SELECT DISTINCT state FROM deliveries") == [("delivered",)]


def test_a_message_too_many_leaves_no_row_behind(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """A repeated message, or a courier without a free thread, meets a delivery that is done, or due much later."""
    receiver.respond = receivers.status(500)
    delivery_id = finish(api, receiver.url)
    first, second = later(0), later(1000)
    deliver_webhook.run_once(delivery_id, now=lambda: first)
    deliver_webhook.run_once(delivery_id, now=lambda: second)
    (due,) = world.sql("SELECT available_at FROM outbox WHERE task = 'deliver_webhook'")[0]
    deliver_webhook.run_once(delivery_id)
    deliver_webhook._step_back(delivery_id, clock.now())
    assert world.sql("SELECT available_at, state FROM outbox WHERE task = 'deliver_webhook'") == [(due, "waiting")]
    receiver.respond = None
    assert deliver_webhook.run_once(delivery_id, now=lambda: later(2000)).state == "delivered"
    with db.transaction() as tx:
        turns.stage(tx, delivery_id, clock.now(), clock.now())
    deliver_webhook.run_once(delivery_id)
    assert world.count("outbox", "task = 'deliver_webhook'") == 0


def test_a_callback_that_waits_for_nobody_is_found(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery_id = finish(api, receiver.url)
    world.sql("DELETE FROM outbox WHERE task = 'deliver_webhook'")
    assert rescue_stalled.run_once(later(5), {}) == 0
    assert rescue_stalled.run_once(later(11), {}) == 1
    assert ("deliver_webhook", delivery_id) in relay(later(12))


@one_database
def test_callbacks_leave_threads_to_the_relay(api: FlaskClient, world: World, receiver: Receiver) -> None:
    world.set(COURIER_CONCURRENCY=16)
    delivery_id = finish(api, receiver.url)
    with contextlib.ExitStack() as others:
        while others.enter_context(threads.one(states.WELL)):
            pass
        relay()
        deliver_webhook.deliver_webhook(delivery_id)
        assert receiver.hooks == [] and world.sql("SELECT state, attempts FROM deliveries") == [("pending", 0)]
        assert ("deliver_webhook", delivery_id) in relay(later(2))
    deliver_webhook.run_once(delivery_id, now=lambda: later(2))
    assert len(receiver.hooks) == 1


# --- what is told of it ---


@one_database
@pytest.mark.parametrize("code,state", [(200, "delivered"), (410, "gone"), (500, "pending")])
def test_a_status_counts_whatever_becomes_of_the_body(
    api: FlaskClient, world: World, receiver: Receiver, code: int, state: str,
) -> None:
    over = threading.Event()

    def respond(handler: Any, _: int) -> None:
        handler.wfile.write(b"HTTP/1.1 %d x\r\nContent-Length: 1000\r\n\r\n" % code)
        over.wait(20)

    receiver.respond = respond
    world.set(CALLBACK_ALLOW=f"127.0.0.1:{receiver.port}", CALLBACK_TIMEOUT_SECONDS="1.5")  # the status comes sooner
    after = deliver_webhook.run_once(finish(api, receiver.url))
    over.set()
    assert (after.state, after.last_response) == (state, code)
    assert world.sql("SELECT error FROM delivery_attempts") == [("no whole answer within 1.5 s",)]


def test_a_job_without_a_callback_has_no_delivery(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    assert world.count("deliveries") == 0
    assert api.get(f"/jobs/{job_id}/deliveries").json == {"deliveries": []}
    assert "callback" not in api.get(f"/jobs/{job_id}").json


def test_a_callback_that_was_asked_for_is_shown_from_the_start(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    assert api.get(f"/jobs/{job_id}").json["callback"] == {"status": "pending", "attempts": 0}
    run_job.run_once(job_id)
    shown = api.get(f"/jobs/{job_id}").json["callback"]
    assert shown.keys() == {"status", "attempts", "next_attempt_at"} and shown["status"] == states.PENDING


def test_what_a_receiver_answers_is_kept_safely(api: FlaskClient, world: World, receiver: Receiver) -> None:
    def respond(handler: Any, _: int) -> None:
        handler.send_response(500)
        handler.send_header("Content-Length", "5000")
        handler.end_headers()
        handler.wfile.write(b"\x00\xff<b>" + b"x" * 4995)

    receiver.respond = respond
    deliver_webhook.run_once(finish(api, receiver.url))
    (row,) = api.get(f"/jobs/{job_of(world)}/deliveries").json["deliveries"]
    assert row["excerpt"].startswith("\ufffd\ufffd<b>x") and len(row["excerpt"]) <= 1024
