"""POST /jobs/<id>/redeliver and GET /jobs/<id>/deliveries: how a job ended is told once more, in a round of its own."""
from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, db, deliveries, jobs, outbox, redis_client, retention, schema, status, waking
from app.api import create_app
from tasks import deliver_webhook, prune_expired, rescue_stalled, run_job
from tasks.egress import Answer
from tests import receiver as receivers
from tests.asking import a_checked_kind, all_at_once, another, cancel, deliver_all, nothing_is_wrong, problem, redeliver
from tests.conftest import World, one_database
from tests.receiver import Receiver
from tests.running import later, relay, submit
from tests.servers import wait_until


def end(api: FlaskClient, receiver: Receiver, code: int = 204) -> str:
    """A job that has ended, and its callback, which was answered with this; returns the job's id."""
    receiver.respond = receivers.status(code)
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    deliver_all()
    return job_id


def callback(api: FlaskClient, job_id: str) -> dict[str, Any]:
    return api.get(f"/jobs/{job_id}").json["callback"]


def tries(api: FlaskClient, job_id: str) -> list[dict[str, Any]]:
    return api.get(f"/jobs/{job_id}/deliveries").json["deliveries"]


# --- a round that is over ---


@pytest.mark.parametrize("code,ended", [(204, "delivered"), (400, "exhausted"), (410, "gone"), (None, "refused")])
def test_after_the_end_of_a_round_there_is_one_more(
    api: FlaskClient, world: World, receiver: Receiver, code: int | None, ended: str,
) -> None:
    allowed = f"127.0.0.1:{receiver.port}"
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    receiver.respond = receivers.status(code or 204)
    world.set(CALLBACK_ALLOW=allowed if code else "")
    deliver_all()
    assert callback(api, job_id)["status"] == ended
    before = api.get(f"/jobs/{job_id}").json
    world.set(CALLBACK_ALLOW=allowed)
    receiver.respond = None
    world.redis.delete(waking.KEY)

    answer = redeliver(api, job_id)
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/jobs/{job_id}/deliveries")
    assert answer.headers["Cache-Control"] == "no-store"
    shown = answer.json["callback"]
    assert answer.json == {"job_id": job_id, "callback": shown}
    assert (shown.pop("status"), shown.pop("attempts"), *shown) == ("pending", 0, "next_attempt_at")
    assert callback(api, job_id)["status"] == "pending" and world.redis.llen(waking.KEY) == 1
    assert deliver_all() == []

    first, second = tries(api, job_id)
    assert first["webhook_id"] != second["webhook_id"] and first["at"] <= second["at"]
    assert [(row["attempt"], row["response_code"]) for row in (first, second)] == [(1, code), (1, 204)]
    assert callback(api, job_id) == {"status": "delivered", "attempts": 1, "last_response": 204}
    assert {**api.get(f"/jobs/{job_id}").json, "callback": None} == {**before, "callback": None}
    ids = [hook.headers["webhook-id"] for hook in receiver.hooks]
    assert ids == [row["webhook_id"] for row in (first, second)][-len(ids):]
    assert len({hook.body for hook in receiver.hooks}) == 1 and len(ids) == (2 if code else 1)
    assert nothing_is_wrong(world)


def test_every_round_has_the_whole_schedule(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """The list shows all tries of all rounds in order; the job shows the latest round."""
    job_id = end(api, receiver, 503)
    deliver_all(later(10))
    deliver_all(later(1000))
    assert callback(api, job_id) == {"status": "exhausted", "attempts": 3, "last_response": 503}
    redeliver(api, job_id)
    deliver_all(later(2000))
    receiver.respond = None
    deliver_all(later(3000))
    assert callback(api, job_id) == {"status": "delivered", "attempts": 2, "last_response": 204}
    rows = tries(api, job_id)
    assert [(row["attempt"], row["response_code"]) for row in rows] == [
        (1, 503), (2, 503), (3, 503), (1, 503), (2, 204)]
    assert [row["webhook_id"] for row in rows] == [hook.headers["webhook-id"] for hook in receiver.hooks]
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    assert len({row["webhook_id"] for row in rows[:3]}) == len({row["webhook_id"] for row in rows[3:]}) == 1
    assert nothing_is_wrong(world)


def test_rounds_stay_in_order_where_clocks_differ(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """The clock of whoever asks is behind that of the courier."""
    receiver.respond = receivers.status(410)
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id, now=lambda: later(5))
    deliver_all(later(6))
    receiver.respond = None
    for _ in range(2):
        assert redeliver(api, job_id).json["callback"]["attempts"] == 0
        assert callback(api, job_id)["status"] == "pending"
    deliver_all()
    assert callback(api, job_id)["status"] == "delivered"
    assert [row["response_code"] for row in tries(api, job_id)] == [410, 204] and len(receiver.hooks) == 2


def test_a_late_write_of_the_round_before_does_not_cover_the_new_one(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    job_id = end(api, receiver)
    with db.reading() as view:
        before = jobs.find(view, job_id), deliveries.latest_of_job(view, job_id)
    shown = redeliver(api, job_id).json["callback"]
    status.write(*before)
    assert callback(api, job_id) == shown and shown["status"] == "pending"


def test_the_end_of_a_cancelled_job_is_told_again(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    cancel(api, job_id)
    deliver_all()
    assert redeliver(api, job_id).status_code == 202
    deliver_all()
    first, second = receiver.hooks
    assert first.body == second.body and json.loads(first.body)["error"]["code"] == "cancelled"


def test_without_redis_a_round_is_taken_all_the_same(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = end(api, receiver)
    redis_client._away_until = float("inf")
    assert redeliver(api, job_id).status_code == 202 and callback(api, job_id)["status"] == "pending"
    redis_client._away_until = 0.0
    deliver_all()
    assert len(receiver.hooks) == 2


# --- a round that is under way ---


def waits_for_the_relay(delivery_id: str) -> None:
    pass


def is_being_published(delivery_id: str) -> None:
    with db.transaction() as tx:
        assert outbox.claim(tx, "a relay", later(10_000), later(10_015), 10)


def is_published(delivery_id: str) -> None:
    assert relay(later(10_000)) == [("deliver_webhook", delivery_id)]


def has_lost_its_row(delivery_id: str) -> None:
    with db.transaction() as tx:
        outbox.settle(tx, "deliver_webhook", delivery_id)


@pytest.mark.parametrize(
    "message", [waits_for_the_relay, is_being_published, is_published, has_lost_its_row],
    ids=lambda message: message.__name__)
def test_a_round_that_waits_goes_on_at_once(
    api: FlaskClient, world: World, receiver: Receiver, message: Callable[[str], None],
) -> None:
    job_id = end(api, receiver, 503)
    (delivery_id,) = world.sql("SELECT id FROM deliveries")[0]
    assert callback(api, job_id)["next_attempt_at"] > clock.isoformat(later(1)) and relay() == []
    message(delivery_id)
    receiver.respond = None
    for _ in range(2):
        shown = redeliver(api, job_id).json["callback"]
        assert (shown["status"], shown["attempts"], shown["last_response"]) == ("pending", 1, 503)
        assert shown["next_attempt_at"] <= clock.isoformat(clock.now()) and callback(api, job_id) == shown
    assert deliver_all() == []
    assert callback(api, job_id) == {"status": "delivered", "attempts": 2, "last_response": 204}
    assert [(row["webhook_id"], row["attempt"]) for row in tries(api, job_id)] == [(delivery_id, 1), (delivery_id, 2)]
    assert len(receiver.hooks) == 2 and world.count("deliveries") == 1 and world.count("outbox") == 0
    assert nothing_is_wrong(world)


@pytest.mark.parametrize("code,then", [(204, "delivered"), (503, "pending")])
def test_a_round_that_is_asked_for_during_an_attempt_follows_it(
    api: FlaskClient, world: World, receiver: Receiver, code: int, then: str,
) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    (delivery_id,) = world.sql("SELECT id FROM deliveries")[0]

    def post(*_: Any) -> Answer:
        for _ in range(2):  # a second time it waits already, and is due already
            answer = redeliver(another(api), job_id)
            assert answer.status_code == 202 and answer.json["callback"]["status"] == "pending"
            assert world.count("deliveries") == 2
        return Answer(code, None, b"")

    assert deliver_webhook.run_once(delivery_id, post=post).state == then
    assert deliver_all() == [] and callback(api, job_id)["status"] == "delivered"
    assert len(receiver.hooks) == 1 and len(tries(api, job_id)) == 2 and nothing_is_wrong(world)


def test_a_busy_host_gets_no_more_tries_than_allowed(api: FlaskClient, world: World, receiver: Receiver) -> None:
    done, other = end(api, receiver), end(api, receiver)
    world.set(CALLBACK_PER_HOST=1)
    for job_id in (done, other):
        redeliver(api, job_id)

    def post(*_: Any) -> Answer:
        assert deliver_all() == [] and callback(api, other)["status"] == "pending"
        assert redeliver(another(api), other).json["callback"]["status"] == "pending"
        assert deliver_all() == [] and len(receiver.hooks) == 2
        return Answer(204, None, b"")

    (first,) = world.sql("SELECT id FROM deliveries WHERE job_id = :id AND state = 'pending'", id=done)[0]
    assert deliver_webhook.run_once(first, post=post).state == "delivered"
    assert deliver_all() == [] and len(receiver.hooks) == 3  # its turn has come
    assert Counter(len(tries(api, job_id)) for job_id in (done, other)) == {2: 2} and nothing_is_wrong(world)


# --- many at one moment ---


def test_who_asks_at_one_moment_gets_one_round(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = end(api, receiver)
    answers = all_at_once([functools.partial(redeliver, another(api), job_id)] * 8)
    assert [answer.status_code for answer in answers] == [202] * 8 and world.count("deliveries") == 2
    deliver_all()
    assert len(receiver.hooks) == 2 and nothing_is_wrong(world)


def test_a_round_that_is_asked_for_while_another_ends_is_made(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    """Whoever asked before the end is told by that try, whoever asked after it by one more round."""
    ids = [end(api, receiver) for _ in range(4)]
    for job_id in ids:
        redeliver(api, job_id)
    under_way = [row[0] for row in world.sql("SELECT id FROM deliveries WHERE state = 'pending'")]
    calls = [functools.partial(deliver_webhook.run_once, delivery_id) for delivery_id in under_way]
    calls += [functools.partial(redeliver, another(api), job_id) for job_id in ids for _ in range(3)]
    assert [answer.status_code for answer in all_at_once(calls)[4:]] == [202] * 12
    deliver_all(later(2))  # who was made due anew while it was being claimed comes back a second later
    assert {len(tries(api, job_id)) for job_id in ids} <= {2, 3} and world.count("outbox") == 0
    assert world.sql("SELECT DISTINCT state FROM deliveries") == [("delivered",)] and nothing_is_wrong(world)
    assert Counter(hook.headers["webhook-id"] for hook in receiver.hooks).most_common(1)[0][1] == 1


# --- refused ---


def test_what_has_not_ended_is_not_told(api: FlaskClient, world: World, receiver: Receiver) -> None:
    def work(input: Any, job: Any) -> None:
        assert problem(redeliver(another(api), job.id)) == (409, "unfinished")

    with a_checked_kind(work) as name:
        job_id = submit(api, name, callback_url=receiver.url)
        assert problem(redeliver(api, job_id)) == (409, "unfinished")
        assert run_job.run_once(job_id).status == "succeeded"
    assert world.count("deliveries") == 1


def test_a_job_without_a_callback_tells_nobody(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    assert problem(redeliver(api, job_id)) == (409, "no-callback")
    run_job.run_once(job_id)
    assert problem(redeliver(api, job_id)) == (409, "no-callback")
    assert tries(api, job_id) == [] and world.count("deliveries") == world.count("outbox") == 0


def test_whose_job_it_is_not_can_have_nobody_told(world: World, receiver: Receiver) -> None:
    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    api = create_app().test_client()
    ada, bob = ({"Authorization": f"Bearer secret-{letter}"} for letter in "ab")
    job_id = api.post("/jobs", json={"n": 5, "callback_url": receiver.url}, headers=ada).json["job_id"]
    assert problem(redeliver(api, job_id, headers=bob)) == (404, "not-found")
    run_job.run_once(job_id)
    deliver_all()
    assert problem(redeliver(api, job_id, headers=bob)) == (404, "not-found")
    assert problem(api.get(f"/jobs/{job_id}/deliveries", headers=bob)) == (404, "not-found")
    assert problem(redeliver(api, job_id)) == (401, "unauthorized")
    assert len(api.get(f"/jobs/{job_id}/deliveries", headers=ada).json["deliveries"]) == world.count("deliveries") == 1


@one_database
@pytest.mark.parametrize("job_id", ["x", "%00", "0190b2a4-0000-7000-8000-000000000000", "1" * 5000])
def test_an_unknown_job_tells_nobody(api: FlaskClient, world: World, job_id: str) -> None:
    assert problem(redeliver(api, job_id)) == (404, "not-found")
    assert problem(api.get(f"/jobs/{job_id}/deliveries")) == (404, "not-found")


@one_database
def test_each_address_has_its_method(api: FlaskClient, world: World) -> None:
    for path, method, allowed in (("redeliver", "GET", "POST"), ("deliveries", "POST", "GET")):
        answer = api.open(f"/jobs/{submit(api, n=5)}/{path}", method=method)
        assert problem(answer) == (405, "method-not-allowed") and allowed in answer.headers["Allow"]


def test_an_expired_job_tells_nobody(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = end(api, receiver)
    world.sql("UPDATE jobs SET expires_at = finished_at")
    for _ in range(2):  # before it is pruned and afterwards
        assert problem(redeliver(api, job_id)) == (410, "expired")
        assert problem(api.get(f"/jobs/{job_id}/deliveries")) == (410, "expired")
        prune_expired.run_once(later(1))
    assert world.count("jobs") == world.count("deliveries") == world.count("outbox") == 0


def test_an_exhausted_callback_is_kept_to_be_asked_for_again(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    """The schedule may take longer than the job can be read."""
    job_id = end(api, receiver, 404)
    with db.transaction() as tx:
        tx.execute(schema.jobs.update().values(finished_at=later(-86_410), expires_at=later(-10)))
    receiver.respond = None
    assert prune_expired.run_once(later(86_000)) == 0 and nothing_is_wrong(world)
    world.redis.flushall()
    assert problem(api.get(f"/jobs/{job_id}")) == (410, "expired")
    assert redeliver(api, job_id).status_code == 202
    assert redeliver(api, job_id).status_code == 202  # under way: hastened
    deliver_all()
    assert len(receiver.hooks) == 2 and problem(redeliver(api, job_id)) == (410, "expired")
    assert prune_expired.run_once(later(86_401)) == 1


def test_an_exhausted_callback_is_kept_no_longer_than_a_result(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    job_id = end(api, receiver, 404)
    with db.transaction() as tx:
        tx.execute(schema.jobs.update().values(finished_at=later(-86_410), expires_at=later(-10)))
        tx.execute(schema.deliveries.update().values(finished_at=later(-86_401)))
    assert problem(redeliver(api, job_id)) == (410, "expired")
    assert prune_expired.run_once(clock.now()) == 1


def test_a_job_that_is_being_pruned_has_expired(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """The pruning has begun, and its clock is ahead."""
    job_id = end(api, receiver)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(redeliver(another(api), job_id)))
    with db.transaction() as tx:
        assert retention.bury_expired_jobs(tx, later(86_401)) == [job_id]
        asking.start()
        if world.dialect == "postgresql":
            wait_until(lambda: waits_for_a_lock(world))
    asking.join()
    assert problem(answers[0]) == (410, "expired")


def waits_for_a_lock(world: World) -> bool:
    return world.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND "
                     "datname = current_database()")[0][0] > 0


def test_a_job_is_not_pruned_while_it_is_told_again(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = end(api, receiver)
    if world.dialect == "postgresql":  # SQLite has one writer
        with db.transaction() as tx:
            assert jobs.keep(tx, job_id) is not None
            assert prune_expired.run_once(later(86_401)) == 0
    redeliver(api, job_id)
    assert prune_expired.run_once(later(86_401)) == 0
    deliver_all()
    assert len(receiver.hooks) == 2 and prune_expired.run_once(later(86_401)) == 1


def test_a_courier_that_died_in_the_new_round_is_followed_by_another(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    job_id = end(api, receiver)
    redeliver(api, job_id)
    (new,) = world.sql("SELECT id FROM deliveries WHERE state = 'pending'")[0]
    with db.transaction() as tx:
        assert deliveries.claim(tx, deliveries.find(tx, new), clock.now(), later(30), 4, None) is not None
    assert rescue_stalled.run_once(later(31), {}) == 1
    deliver_all(later(60))
    assert [(row["attempt"], row["response_code"]) for row in tries(api, job_id)] == [(1, 204), (1, None), (2, 204)]
    assert callback(api, job_id)["attempts"] == 2 and nothing_is_wrong(world)
