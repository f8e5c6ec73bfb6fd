"""The relay: the only door to the broker."""
from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import datetime, timedelta

import pytest
from flask.testing import FlaskClient
from kombu.exceptions import OperationalError as BrokerAway

from app import clock, db, jobs, outbox, presence, waking
from app.outbox import Row
from tasks import celery, publishing, relay_outbox, rescue_stalled, run_job
from tests.conftest import World, one_database
from tests.running import Broker, Crash, a_kind, die_in_mid_job, later, relay, submit
from tests.servers import wait_until


def test_one_submission_is_one_message_on_its_queue(api: FlaskClient, world: World) -> None:
    job_id = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"}).json["job_id"]
    api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    for _ in range(3):
        relay_outbox.drain(publishing.publish)
    assert world.redis.llen("q:jobs2") == 1
    message = json.loads(world.redis.lindex("q:jobs2", 0))
    assert message["headers"]["task"] == "tasks.run_job"
    assert message["headers"]["argsrepr"] == f"[{job_id!r}]"
    assert message["content-type"] == "application/json"
    assert world.sql("SELECT state FROM outbox") == [("published",)]


def test_what_the_broker_took_is_marked_with_a_later_claim(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_outbox, "_MARK_SECONDS", 60)
    unmarked = relay_outbox.Unmarked()
    first, second, third = (submit(api, n=number) for number in range(3))
    relay_outbox.drain(publishing.publish, unmarked=unmarked)
    assert world.count("outbox", "state = 'leased'") == 3 and world.redis.llen("q:jobs2") == 3
    run_job.run_once(first)  # whoever claims it does not wait for that
    fourth = submit(api, n=4)
    assert relay_outbox.drain(publishing.publish, unmarked=unmarked) == 1
    assert world.count("outbox", "state = 'leased'") == 3
    monkeypatch.setattr(relay_outbox, "_MARK_SECONDS", 0)
    fifth = submit(api, n=5)
    assert relay_outbox.drain(publishing.publish, unmarked=unmarked) == 1
    assert dict(world.sql("SELECT target_id, state FROM outbox")) == {
        second: "published", third: "published", fourth: "published", fifth: "leased"}


def test_a_relay_that_ends_leaves_nothing_unmarked(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    world.set(RELAY_INTERVAL_SECONDS="0.1")
    for number in range(3):
        submit(api, n=number)
        relay_outbox.relay_outbox()
    assert world.count("outbox", "state = 'published'") == 3
    submit(api, n=3)
    monkeypatch.setattr(waking, "wait", die_in_mid_job)
    with pytest.raises(BaseException):
        relay_outbox.relay_outbox()
    assert world.count("outbox", "state = 'published'") == 4


def test_a_message_carries_ids_only(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    url = "http://127.0.0.1:9/hook?token=CANARY2"
    for path, body in (("/notes", {"text": "CANARY1"}), ("/jobs", {"n": 987654})):
        run_job.run_once(api.post(path, json={**body, "callback_url": url}).json["job_id"])
        api.post(path, json={**body, "callback_url": url})
    relay_outbox.drain(publishing.publish)
    kept = "".join(world.redis.lrange("q:jobs2", 0, -1) + world.redis.lrange("callbacks", 0, -1))
    assert world.redis.llen("q:jobs2") == 2 and world.redis.llen("callbacks") == 2
    for secret in ("CANARY", "987654", "127.0.0.1:9"):
        assert secret not in kept


def test_the_kinds_limits_travel_with_the_message(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: None, time_limit=7, queue="q:slow") as kind:
        submit(api, kind)
        relay_outbox.drain(publishing.publish)
    assert json.loads(world.redis.lindex("q:slow", 0))["headers"]["timelimit"] == [17.0, 7.0]


def test_relays_that_run_at_once_publish_each_row_once(api: FlaskClient, world: World) -> None:
    for _ in range(250):
        submit(api, n=1)
    brokers, barrier = [Broker() for _ in range(4)], threading.Barrier(4)

    def work(broker: Broker) -> None:
        barrier.wait()
        relay_outbox.drain(broker.publish)

    threads = [threading.Thread(target=work, args=(broker,)) for broker in brokers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    published = Counter(target for broker in brokers for _, target in broker.taken())
    assert len(published) == 250 and set(published.values()) == {1}
    assert world.count("outbox", "state = 'published'") == 250


def test_no_transaction_is_open_while_a_message_is_published(api: FlaskClient, world: World) -> None:
    submit(api, n=1)

    def publish(row: Row) -> None:
        assert world.sql("SELECT state FROM outbox") == [("leased",)]  # another connection can write and read

    relay_outbox.drain(publish)


def test_a_relay_that_dies_after_publishing_publishes_again(api: FlaskClient, world: World) -> None:
    """Not marked is not published: the second message finds the job done."""
    job_id = submit(api, n=5)

    def publish(row: Row) -> None:
        run_job.run_once(row.target_id)
        raise Crash

    with pytest.raises(Crash):
        relay_outbox.drain(publish)
    assert relay() == [] and relay(later(relay_outbox.LEASE_SECONDS + 1)) == []  # claimed: nothing is left to publish
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"


def test_a_relay_that_dies_before_publishing_is_followed_by_another(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)

    def publish(row: Row) -> None:
        raise Crash

    with pytest.raises(Crash):
        relay_outbox.drain(publish)
    assert relay() == []  # the dead relay's lease still stands
    assert relay(later(relay_outbox.LEASE_SECONDS + 1)) == [("run_job", job_id)]


def test_a_relay_that_was_frozen_marks_nothing_that_another_has(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    now = clock.now()
    with db.transaction() as tx:
        first = outbox.claim(tx, "first", now, now + timedelta(seconds=1), 10)
        second = outbox.claim(tx, "second", later(2), later(20), 10)
        assert [row.id for row in first] == [row.id for row in second]
        assert outbox.mark_published(tx, first, now) == 0
        assert outbox.mark_published(tx, second, now) == 1


@pytest.mark.parametrize("error", [BrokerAway("refused"), ConnectionError("reset"), OSError("unreachable"),
                                   AttributeError("'NoneType' object has no attribute 'hostname'")])
def test_while_the_broker_is_away_rows_wait(api: FlaskClient, world: World, error: Exception) -> None:
    jobs = [submit(api, n=5) for _ in range(3)]
    tried = []

    def publish(row: Row) -> None:
        tried.append(row.target_id)
        raise error

    relay_outbox.drain(publish)
    assert tried == jobs[:1]  # one refusal says it all
    assert world.sql("SELECT DISTINCT state, failures FROM outbox") == [("waiting", 0)]
    assert [target for _, target in relay(later(2))] == jobs


def test_a_row_that_cannot_be_published_is_parked_and_the_rest_flows(api: FlaskClient, world: World) -> None:
    bad, good = submit(api, n=5), submit(api, n=6)
    broker = Broker()

    def publish(row: Row) -> None:
        if row.target_id == bad:
            raise TypeError("cannot be encoded")
        broker.publish(row)

    for attempt in range(outbox.MAX_FAILURES):
        relay_outbox.drain(publish, now=lambda: later(10 * attempt))
    assert broker.taken() == [("run_job", good)]
    assert world.sql("SELECT state, last_error FROM outbox WHERE target_id = :bad", bad=bad) == [
        ("parked", "TypeError: cannot be encoded")]
    assert "1 parked" in api.get("/health/ready").json["parts"]["unpublished"]["detail"]


def test_rows_that_wait_are_not_published_before_their_time(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    world.sql("UPDATE outbox SET available_at = :then", then=str(later(60).replace(tzinfo=None))
              if world.dialect == "sqlite" else later(60))
    assert relay() == []
    assert relay(later(61)) == [("run_job", job_id)]


def test_a_row_whose_transaction_commits_late_is_not_passed_by(api: FlaskClient, world: World) -> None:
    """Rows are chosen by state, never by an id that others have overtaken."""
    if world.dialect == "sqlite":
        return  # one writer at a time: no row can commit after a younger one
    with db.engine().connect() as slow, slow.begin() as open_tx:
        outbox.stage(slow, "run_job", "late", "q:jobs2", clock.now())
        submit(api, n=5)
        assert len(relay()) == 1
        open_tx.commit()
    assert relay() == [("run_job", "late")]


@one_database
def test_a_submission_wakes_a_waiting_relay(api: FlaskClient, world: World) -> None:
    world.set(RELAY_INTERVAL_SECONDS=30)
    woken = []

    def wait() -> None:
        woken.append((waking.wait(20), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    submitted = time.monotonic()
    submit(api, n=5)
    thread.join()
    assert woken[0][0] == [[]] and woken[0][1] - submitted < 10


# --- lost messages ---


def _worker_lives(world: World, slots: int) -> None:
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], slots)


def rescue(memory: dict, *seconds: float) -> int:
    return sum(rescue_stalled.run_once(later(second), memory) for second in seconds)


def test_a_lost_message_is_published_again_when_workers_are_free(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    relay()
    memory: dict = {}
    assert rescue(memory, 60, 70) == 0  # no worker lives: it waits, it is not lost
    _worker_lives(world, 2)
    assert rescue(memory, 80) == 0  # seen free once
    assert rescue(memory, 85) == 0
    assert rescue(memory, 91) == 1  # and all the time since
    assert relay(later(91)) == [("run_job", job_id)]


def test_a_lost_message_is_published_again_when_consumption_has_passed_it(api: FlaskClient, world: World) -> None:
    lost, later_one = submit(api, n=5), submit(api, n=6)
    relay()
    world.sql("UPDATE outbox SET published_at = :then WHERE target_id = :lost", lost=lost,
              then=str(later(-60).replace(tzinfo=None)) if world.dialect == "sqlite" else later(-60))
    with a_kind(lambda input, job: None):
        run_job.run_once(later_one)
    assert rescue({}, 0) == 1
    assert relay() == [("run_job", lost)]


def test_a_backlog_that_is_worked_off_is_not_lost(api: FlaskClient, world: World) -> None:
    """However long the wait: one slot, always busy."""
    for _ in range(20):
        submit(api, n=5)
    relay()
    world.sql("UPDATE jobs SET status = 'running', attempt = 1, worker = 'w@h', lease_until = :then WHERE id = "
              "(SELECT min(id) FROM jobs)", then=str(later(10**6).replace(tzinfo=None))
              if world.dialect == "sqlite" else later(10**6))
    _worker_lives(world, 1)
    assert rescue({}, 10, 100, 1000, 10_000) == 0


def test_a_slot_that_is_free_for_a_moment_is_no_sign(api: FlaskClient, world: World) -> None:
    """Between two jobs a slot is free; a job that started since it was last seen free says so."""
    waiting = [submit(api, n=5) for _ in range(5)]
    relay()
    _worker_lives(world, 1)
    memory: dict = {}
    assert rescue(memory, 60) == 0
    run_job.run_once(waiting[0], now=lambda: later(65))
    assert rescue(memory, 75, 80) == 0


def test_a_rescue_that_was_away_gives_the_workers_the_time_of_a_heartbeat(api: FlaskClient, world: World) -> None:
    """What kept it from looking kept them from extending their leases."""
    world.set(LEASE_SECONDS=1, RESCUE_INTERVAL_SECONDS=0.1)
    with a_kind(lambda input, job: None) as kind:
        job_id = submit(api, kind)
        die_in_mid_job(job_id)

    def rescued() -> bool:
        rescue_stalled.rescue_stalled()
        return api.get(f"/jobs/{job_id}").json["status"] == "queued"

    wait_until(lambda: clock.now() > lease_of(job_id))
    assert not rescued()  # the first look of all
    wait_until(rescued, 5)


def lease_of(job_id: str) -> datetime:
    with db.reading() as view:
        job = jobs.find(view, job_id)
    assert job is not None and job.lease_until is not None
    return job.lease_until


@one_database
def test_a_sign_of_life_is_fresh_for_a_moment_only(world: World) -> None:
    _worker_lives(world, 2)
    assert len(presence.signs_of_life("worker", presence.FRESH_SECONDS)) == 1
    world.redis.pexpire("presence:worker:w@h", int((presence.PRESENCE_SECONDS - presence.FRESH_SECONDS) * 1000) - 500)
    assert presence.signs_of_life("worker", presence.FRESH_SECONDS) == []
    assert len(presence.signs_of_life("worker")) == 1


def test_a_stalled_job_runs_again_and_a_job_that_kills_ends(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: None, max_attempts=2) as kind:
        job_id = submit(api, kind)
        for attempt in (1, 2):
            die_in_mid_job(job_id)
            assert rescue({}, 0) == 0  # the lease stands
            world.redis.delete(waking.KEY)
            assert rescue({}, 31) == 1
            assert world.redis.llen(waking.KEY) == 1
            shown = api.get(f"/jobs/{job_id}").json
            assert shown["status"] == ("queued" if attempt == 1 else "failed") and shown["attempt"] == attempt
    assert shown["error"]["code"] == "crashed"


@pytest.mark.parametrize("heartbeat_after,code", [(5, "crashed"), (25, "timeout")])
def test_a_job_killed_at_its_hard_limit_is_a_timeout(
    api: FlaskClient, world: World, heartbeat_after: float, code: str,
) -> None:
    """It lived beyond its time limit; one that died before it has crashed, however late that is noticed."""
    with a_kind(lambda input, job: None, max_attempts=1, time_limit=20) as kind:
        job_id = submit(api, kind)
        die_in_mid_job(job_id)
        with db.transaction() as tx:
            held = jobs.find(tx, job_id)
            jobs.extend_lease(tx, held, later(heartbeat_after + 30), None, None)
    assert rescue({}, heartbeat_after + 31) == 1
    assert api.get(f"/jobs/{job_id}").json["error"]["code"] == code


def test_rescues_that_run_at_once_rescue_once(api: FlaskClient, world: World) -> None:
    with a_kind(lambda input, job: None) as kind:
        for _ in range(10):
            die_in_mid_job(submit(api, kind))
    barrier, rescued = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        rescued.append(rescue({}, 31))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(rescued) == 10
    assert world.count("jobs", "status = 'queued' AND version = 2") == 10


def test_a_lost_callback_message_is_published_again(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    run_job.run_once(submit(api, n=5, callback_url="http://127.0.0.1:9/"))
    (published,) = relay()
    assert rescue({}, 60) == 0  # no courier lives
    presence.give_sign_of_life("courier", "c@h", ["relay", "callbacks"], 64)
    assert rescue({}, 5) == 0
    assert rescue({}, 60) == 1
    assert relay(later(60)) == [published]


# --- the tick ---


@one_database
def test_a_tick_drains_and_drains_again_when_it_is_woken(api: FlaskClient, world: World) -> None:
    world.set(RELAY_INTERVAL_SECONDS=3)
    first = submit(api, n=5)
    tick = threading.Thread(target=relay_outbox.relay_outbox)
    tick.start()
    wait_until(lambda: world.redis.llen("q:jobs2") == 1)
    second = submit(api, n=6)
    wait_until(lambda: world.redis.llen("q:jobs2") == 2)
    assert tick.is_alive()  # within one tick
    assert presence.relay_ran_at() is not None
    tick.join()
    kept = "".join(world.redis.lrange("q:jobs2", 0, -1))
    assert first in kept and second in kept


@one_database
def test_a_tick_listens_until_the_next_one_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one comes an interval later, or a little more."""
    waited: list[float] = []
    monkeypatch.setattr(relay_outbox, "drain", lambda *_, **__: 0)
    monkeypatch.setattr(waking, "wait", lambda seconds: waited.append(seconds))
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    for interval in (0.1, 1, 60):
        world.set(RELAY_INTERVAL_SECONDS=interval)
        relay_outbox.relay_outbox()
    assert waited[::2] == [0.05] * 3  # before it marks what nobody has claimed
    assert waited[1::2] == pytest.approx([0.15, 1.25, 60.25])


@one_database
def test_ticks_take_no_more_than_two_threads(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    for _ in range(2):
        assert relay_outbox._two_relays.acquire(blocking=False)
    try:
        relay_outbox.relay_outbox()
        assert not world.redis.exists("q:jobs2")
    finally:
        for _ in range(2):
            relay_outbox._two_relays.release()
    assert celery.app.tasks["tasks.run_job"].acks_late  # so that no worker holds messages that another could run
