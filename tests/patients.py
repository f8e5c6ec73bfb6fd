"""What may be wrong with a system, each with its id, and what passes by in one that works: the doctor's patients."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import text

from app import clock, db, deliveries, outbox, presence, schema
from tasks import deliver_webhook, prune_expired, run_job
from tasks.egress import Answer
from tests.asking import cancel, redeliver
from tests.conftest import World
from tests.running import Crash, a_kind, die_in_mid_job, finish, later, relay, run_to_end, submit

HOOK = "http://127.0.0.1:9/"
BUSY = "http://127.0.0.1:9/busy"


def put(table: str, where: str = "1 = 1", **values: Any) -> None:
    """Changes rows behind everybody's back; a moment is given as seconds from now."""
    changed = schema.metadata.tables[table]
    moments = {name: later(value) if isinstance(changed.c[name].type, schema.Moment) and value is not None else value
               for name, value in values.items()}
    with db.transaction() as tx:
        tx.execute(changed.update().where(text(where)).values(moments))


def stage(target_id: str, task: str = "run_job", queue: str = "q:jobs2") -> None:
    with db.transaction() as tx:
        outbox.stage(tx, task, target_id, queue, clock.now())


def publish() -> None:
    """The relay publishes; nobody has claimed the messages yet."""
    assert relay()


def submit_note(api: FlaskClient) -> str:
    return api.post("/notes", json={"text": "x"}).json["job_id"]


def submit_with_key(api: FlaskClient, key: str = "k") -> str:
    return api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": key}).json["job_id"]


def hang(delivery_id: str, then: Callable[[], None] = lambda: None) -> None:
    """A try whose courier dies in it."""

    def die(*_: Any) -> Answer:
        then()
        raise Crash

    with pytest.raises(Crash):
        deliver_webhook.run_once(delivery_id, post=die)


def expire(seconds: int) -> None:
    put("jobs", "expires_at IS NOT NULL", expires_at=-seconds)


# --- what can be broken: each returns the id that is to be found ---

Break = Callable[[FlaskClient, World], str]


def the_row_of_a_job_is_gone(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    world.sql("DELETE FROM outbox")
    return job_id


def a_worker_died_long_ago(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    put("jobs", "status = 'running'", lease_until=-36)
    return job_id


def a_job_runs_for_days(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    put("jobs", "status = 'running'", started_at=-3 * 86_400)
    return job_id


def a_function_hears_nothing(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    cancel(api, job_id)
    put("jobs", cancel_requested_at=-101)
    return job_id


def a_delivery_is_gone(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5, callback_url=HOOK)
    run_job.run_once(job_id)
    for table in ("outbox", "deliveries"):
        world.sql(f"DELETE FROM {table}")
    return job_id


def a_job_that_was_told_begins_anew(api: FlaskClient, world: World) -> str:
    delivery_id = finish(api, HOOK)
    put("jobs", status="queued", result=None, finished_at=None, expires_at=None)
    stage(world.sql("SELECT id FROM jobs")[0][0])
    return delivery_id


def the_row_of_a_due_delivery_is_gone(api: FlaskClient, world: World) -> str:
    delivery_id = finish(api, HOOK)
    world.sql("DELETE FROM outbox")
    put("deliveries", next_attempt_at=-36)
    return delivery_id


def the_row_of_a_waiting_delivery_is_gone(api: FlaskClient, world: World) -> str:
    delivery_id = the_row_of_a_due_delivery_is_gone(api, world)
    put("deliveries", next_attempt_at=3000)
    return delivery_id


def the_row_is_gone_and_another_host_is_busy(api: FlaskClient, world: World) -> str:
    delivery_id = the_row_of_a_due_delivery_is_gone(api, world)
    put("deliveries", host="elsewhere:80")
    hang(finish(api, BUSY))
    return delivery_id


def the_row_is_gone_and_its_host_is_busy_later(api: FlaskClient, world: World) -> str:
    delivery_id = the_row_of_a_due_delivery_is_gone(api, world)
    later_one = finish(api, HOOK)
    put("deliveries", f"id = '{later_one}'", next_attempt_at=3000)
    put("outbox", available_at=3000)
    return delivery_id


def a_courier_died_long_ago(api: FlaskClient, world: World) -> str:
    delivery_id = finish(api, HOOK)
    hang(delivery_id)
    put("deliveries", leased_until=-36)
    return delivery_id


def a_row_is_parked(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    put("outbox", state="parked", failures=5, last_error="TypeError: cannot be encoded")
    return job_id


def a_row_waits_long(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    put("outbox", available_at=-32)
    return job_id


def a_relay_died_long_ago(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    put("outbox", state="leased", lease="x", leased_until=-32)
    return job_id


def _overtaken(api: FlaskClient, by: int) -> str:
    """A message that was published 100 s ago; `by` so much later another one, which was claimed 40 s ago."""
    lost, claimed = submit(api, n=5), submit(api, n=6)
    publish()
    put("outbox", f"target_id = '{lost}'", published_at=-100)
    put("outbox", f"target_id = '{claimed}'", published_at=-100 + by)
    run_job.run_once(claimed, now=lambda: later(-40))
    return lost


def _claimed(api: FlaskClient, published: int, at: int) -> str:
    job_id = submit(api, n=7)
    publish()
    put("outbox", f"target_id = '{job_id}'", published_at=published)
    run_job.run_once(job_id, now=lambda: later(at))
    return job_id


def messages_published_later_are_claimed(api: FlaskClient, world: World) -> str:
    lost = _overtaken(api, by=50)
    put("jobs", "status = 'succeeded'", finished_at=-1)  # so that somebody is at work
    return lost


def they_are_claimed_while_another_queue_goes_on(api: FlaskClient, world: World) -> str:
    lost = messages_published_later_are_claimed(api, world)
    put("jobs", f"id = '{_claimed(api, published=-38, at=-37)}'", queue="q:slow")
    return lost


def no_worker_claims(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    publish()
    put("outbox", published_at=-36)
    return job_id


def fail_once(api: FlaskClient) -> str:
    with a_kind(lambda input, job: 1 / 0) as kind:
        job_id = submit(api, kind)
        run_job.run_once(job_id)
    return job_id


def no_worker_claims_the_next_attempt(api: FlaskClient, world: World) -> str:
    job_id = fail_once(api)
    put("jobs", started_at=-5000, published_at=-5000)
    put("outbox", state="published", published_at=-36, created_at=-5000)
    return job_id


def no_courier_claims(api: FlaskClient, world: World) -> str:
    delivery_id = finish(api, HOOK)
    publish()
    put("outbox", published_at=-36)
    return delivery_id


def a_job_that_is_done_has_a_row(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    stage(job_id)
    put("outbox", created_at=-121)
    return job_id


def a_job_that_is_running_has_a_row(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    stage(job_id)
    put("outbox", created_at=-121)
    return job_id


def a_delivery_that_is_done_has_a_row(api: FlaskClient, world: World) -> str:
    delivery_id = finish(api, HOOK)
    put("deliveries", state="exhausted", next_attempt_at=None, finished_at=-121)
    put("outbox", created_at=-121)
    return delivery_id


def a_row_is_for_nobody(api: FlaskClient, world: World) -> str:
    stage("nobody")
    put("outbox", created_at=-121)
    return "nobody"


def an_event_is_gone(api: FlaskClient, world: World) -> str:
    job_id = submit_note(api)
    run_job.run_once(job_id)
    world.sql("DELETE FROM history_events")
    return job_id


def an_event_is_another_jobs(api: FlaskClient, world: World) -> str:
    job_id = submit_note(api)
    run_job.run_once(job_id)
    put("history_events", job_id="another")
    return job_id


def a_history_failed_after_its_event(api: FlaskClient, world: World) -> str:
    job_id = submit_note(api)
    run_job.run_once(job_id)
    put("jobs", status="failed", error_code="crashed", result=None)
    return job_id


def an_event_is_there_twice(api: FlaskClient, world: World) -> str:
    run_job.run_once(submit_note(api))
    for statement in ("CREATE TABLE lax AS SELECT * FROM history_events", "DROP TABLE history_events",
                      "ALTER TABLE lax RENAME TO history_events",
                      "INSERT INTO history_events SELECT * FROM history_events"):
        world.sql(statement)
    return "1"


def the_job_of_a_note_is_gone(api: FlaskClient, world: World) -> str:
    submit_note(api)
    for table in ("outbox", "jobs"):
        world.sql(f"DELETE FROM {table}")
    return "1"


def the_job_of_a_key_is_gone(api: FlaskClient, world: World) -> str:
    job_id = submit_with_key(api)
    for table in ("outbox", "jobs"):
        world.sql(f"DELETE FROM {table}")
    return job_id


def a_job_expired_long_ago(api: FlaskClient, world: World) -> str:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    expire(361)
    return job_id


def a_job_and_its_callback_ended_long_ago(api: FlaskClient, world: World) -> str:
    job_id = deliveries_job(finish(api, HOOK))
    world.sql("DELETE FROM outbox")
    put("deliveries", state="delivered", next_attempt_at=None, finished_at=-361)
    expire(5000)
    return job_id


def deliveries_job(delivery_id: str) -> str:
    with db.reading() as view:
        delivery = deliveries.find(view, delivery_id)
    assert delivery is not None
    return delivery.job_id


def a_tombstone_is_old(api: FlaskClient, world: World) -> str:
    world.set(TOMBSTONE_TTL_SECONDS=1000)
    return _bury(submit(api, n=5), 1361)


def _bury(job_id: str, expired_seconds_ago: int) -> str:
    run_job.run_once(job_id)
    expire(1)
    assert prune_expired.run_once(clock.now()) == 1
    put("tombstones", f"job_id = '{job_id}'", expired_at=-expired_seconds_ago)
    return job_id


def a_key_is_old(api: FlaskClient, world: World) -> str:
    world.set(IDEMPOTENCY_TTL_SECONDS=1000)
    job_id = _bury(submit_with_key(api), 361)
    put("idempotency_keys", created_at=-1361)
    return job_id


# --- how the story goes on once it is mended ---


def the_job_runs(api: FlaskClient, world: World, job_id: str) -> None:
    assert relay() == [("run_job", job_id)]
    assert run_to_end(job_id).status == "succeeded"
    assert relay() == []


def the_callback_is_made_once(api: FlaskClient, world: World, _: str) -> None:
    posts: list[str] = []

    def post(url: str, *_: Any) -> Answer:
        posts.append(url)
        return Answer(204, None, b"")

    due = [target for task, target in relay(later(4000)) if task == "deliver_webhook"]
    for delivery_id in due * 2:
        deliver_webhook.run_once(delivery_id, post=post, now=lambda: later(4000))
    assert posts == [HOOK]
    assert world.sql("SELECT url, attempts FROM deliveries WHERE state = 'delivered'") == [(HOOK, 1)]


def the_row_is_gone(api: FlaskClient, world: World, target_id: str) -> None:
    assert world.count("outbox") == 0


Story = Callable[[FlaskClient, World, str], None]
BROKEN: dict[str, tuple[Story | None, list[Break]]] = {
    "a queued job has an outbox row": (the_job_runs, [the_row_of_a_job_is_gone]),
    "a running job has a living lease": (None, [a_worker_died_long_ago]),
    "a running job is within its time limit": (None, [a_job_runs_for_days]),
    "a job that is to be cancelled ends": (None, [a_function_hears_nothing]),
    "a final job with a callback has a delivery": (the_callback_is_made_once, [a_delivery_is_gone]),
    "a delivery follows the end of its job": (None, [a_job_that_was_told_begins_anew]),
    "a delivery that waits has an outbox row": (the_callback_is_made_once, [
        the_row_of_a_due_delivery_is_gone, the_row_of_a_waiting_delivery_is_gone,
        the_row_is_gone_and_another_host_is_busy]),
    "a delivery being made has a living lease": (None, [a_courier_died_long_ago]),
    "no outbox row is parked": (the_job_runs, [a_row_is_parked]),
    "an outbox row that is due is published": (None, [a_row_waits_long, a_relay_died_long_ago]),
    "a message that was overtaken is published again": (None, [
        messages_published_later_are_claimed, they_are_claimed_while_another_queue_goes_on]),
    "a message that was published is claimed": (None, [
        no_worker_claims, no_worker_claims_the_next_attempt, no_courier_claims]),
    "an outbox row has something to do": (the_row_is_gone, [
        a_job_that_is_done_has_a_row, a_job_that_is_running_has_a_row, a_delivery_that_is_done_has_a_row,
        a_row_is_for_nobody]),
    "a history that succeeded has its event": (None, [an_event_is_gone, an_event_is_another_jobs]),
    "an event belongs to a history that succeeded": (None, [a_history_failed_after_its_event]),
    "a note has one event": (None, [an_event_is_there_twice]),
    "a note has its job": (None, [the_job_of_a_note_is_gone]),
    "an idempotency key names a job that was": (None, [the_job_of_a_key_is_gone]),
    "an expired job is pruned": (None, [a_job_expired_long_ago, a_job_and_its_callback_ended_long_ago]),
    "an expired tombstone is forgotten": (None, [a_tombstone_is_old]),
    "an expired idempotency key is forgotten": (None, [a_key_is_old]),
}


# --- what passes by in a system that works ---

Make = Callable[[FlaskClient, World], Any]
HEALTHY: list[Make] = []


def healthy(make: Make) -> Make:
    HEALTHY.append(make)
    return make


@healthy
def nothing_at_all(api: FlaskClient, world: World) -> None:
    pass


@healthy
def jobs_wait_for_the_relay_and_for_a_worker(api: FlaskClient, world: World) -> None:
    for state in ({"state": "waiting", "available_at": -20},
                  {"state": "leased", "lease": "x", "leased_until": 10},
                  {"state": "leased", "lease": "x", "leased_until": -20},
                  {"state": "published", "published_at": -20}):
        put("outbox", f"target_id = '{submit(api, n=5, callback_url=HOOK)}'", **state)


@healthy
def a_job_runs(api: FlaskClient, world: World) -> None:
    die_in_mid_job(submit(api, n=5, callback_url=HOOK))


@healthy
def a_function_is_given_time_to_stop(api: FlaskClient, world: World) -> None:
    a_function_hears_nothing(api, world)
    put("jobs", cancel_requested_at=-95)


@healthy
def jobs_are_cancelled_while_they_wait(api: FlaskClient, world: World) -> None:
    cancel(api, submit(api, n=5))
    cancel(api, fail_once(api))
    published = submit(api, n=5, callback_url=HOOK)
    put("outbox", state="published", published_at=-36)
    cancel(api, published)


@healthy
def a_lease_has_just_ended(api: FlaskClient, world: World) -> None:
    die_in_mid_job(submit(api, n=5))
    put("jobs", lease_until=-30)


@healthy
def a_job_waits_for_its_next_attempt(api: FlaskClient, world: World) -> None:
    fail_once(api)
    put("outbox", available_at=30)


@healthy
def a_deep_backlog_is_worked_off(api: FlaskClient, world: World) -> None:
    running = submit(api, n=5)
    for _ in range(3):
        submit(api, n=5)
    publish()
    put("outbox", published_at=-5000, created_at=-5000, available_at=-5000)
    die_in_mid_job(running)
    put("jobs", "status = 'running'", started_at=-4000, time_limit_seconds=5000)


@healthy
def the_only_worker_has_just_finished_a_long_job(api: FlaskClient, world: World) -> None:
    a_deep_backlog_is_worked_off(api, world)
    put("jobs", "status = 'running'", status="succeeded", result="1", lease_until=None, finished_at=-1, expires_at=5000)


@healthy
def the_only_worker_has_just_begun(api: FlaskClient, world: World) -> None:
    a_deep_backlog_is_worked_off(api, world)
    put("jobs", "status = 'running'", status="succeeded", result="1", lease_until=None, started_at=-1,
        finished_at=-5000, expires_at=5000)


@healthy
def the_only_worker_has_just_failed_a_long_job(api: FlaskClient, world: World) -> None:
    no_worker_claims(api, world)
    put("jobs", f"id = '{fail_once(api)}'", started_at=-5000, published_at=-5000)


@healthy
def messages_pass_each_other_by_some_seconds(api: FlaskClient, world: World) -> None:
    _overtaken(api, by=15)
    put("jobs", "status = 'succeeded'", finished_at=-1)


@healthy
def an_earlier_message_was_claimed_since(api: FlaskClient, world: World) -> None:
    _overtaken(api, by=50)
    _claimed(api, published=-110, at=-20)
    _claimed(api, published=-45, at=-1)


@healthy
def another_queue_is_further_on(api: FlaskClient, world: World) -> None:
    waiting = _overtaken(api, by=50)
    put("jobs", "status = 'succeeded'", finished_at=-1)
    presence.give_sign_of_life("worker", "slow@h", ["q:slow"], 1)
    put("outbox", queue="q:slow")
    put("jobs", f"id = '{waiting}'", queue="q:slow")
    submit(api, n=5)
    publish()


@healthy
def a_message_was_overtaken_and_published_again(api: FlaskClient, world: World) -> None:
    _overtaken(api, by=95)
    put("jobs", "status = 'succeeded'", finished_at=-1)
    put("outbox", published_at=-30)


@healthy
def a_repeated_message_overtook_a_row(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    stage(job_id)
    put("outbox", created_at=-100)


@healthy
def callbacks_are_made_and_wait(api: FlaskClient, world: World) -> None:
    done, due_later, under_way = (finish(api, url) for url in (HOOK, "http://127.0.0.1:9/x", BUSY))
    deliver_webhook.run_once(done, post=lambda *_: Answer(204, None, b""))
    deliver_webhook.run_once(due_later, post=lambda *_: Answer(503, None, b""))
    hang(under_way)


@healthy
def ends_are_told_again(api: FlaskClient, world: World) -> None:
    """One whose round is over, one whose round waits, one whose round is being made."""
    callbacks_are_made_and_wait(api, world)
    for (job_id,) in world.sql("SELECT id FROM jobs"):
        assert redeliver(api, job_id).status_code == 202


@healthy
def a_try_has_just_stalled(api: FlaskClient, world: World) -> None:
    hang(finish(api, HOOK))
    put("deliveries", leased_until=-30)


@healthy
def callbacks_wait_for_a_busy_host(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_PER_HOST=1)
    first, *waiting = (finish(api, HOOK) for _ in range(3))
    hang(first, then=lambda: [deliver_webhook.run_once(each) for each in waiting] and None)
    put("deliveries", "state = 'pending'", next_attempt_at=-5000)
    assert world.count("outbox") == 0


@healthy
def callbacks_wait_for_the_next_one_to_their_host(api: FlaskClient, world: World) -> None:
    """Between the end of one try and the claim of the next nothing is under way."""
    callbacks_wait_for_a_busy_host(api, world)
    put("deliveries", "state = 'sending'", state="exhausted", leased_until=None, finished_at=0)
    stage(world.sql("SELECT min(id) FROM deliveries WHERE state = 'pending'")[0][0], "deliver_webhook", "callbacks")


@healthy
def a_callback_has_just_been_overlooked(api: FlaskClient, world: World) -> None:
    the_row_of_a_due_delivery_is_gone(api, world)
    put("deliveries", next_attempt_at=-30)


@healthy
def a_callback_became_due_while_the_doctor_looked(api: FlaskClient, world: World) -> None:
    the_row_of_a_due_delivery_is_gone(api, world)
    put("deliveries", next_attempt_at=20)


@healthy
def many_callbacks_are_published_and_made(api: FlaskClient, world: World) -> None:
    no_courier_claims(api, world)
    hang(finish(api, BUSY))


@healthy
def many_callbacks_are_published_and_were_made_a_moment_ago(api: FlaskClient, world: World) -> None:
    no_courier_claims(api, world)
    deliver_webhook.run_once(finish(api, BUSY), post=lambda *_: Answer(204, None, b""))


@healthy
def jobs_are_pruned(api: FlaskClient, world: World) -> None:
    """A key may outlive its job, a note its history."""
    _bury(submit_with_key(api), 5000)
    run_job.run_once(submit_note(api))
    expire(1)
    prune_expired.run_once(clock.now())
    assert world.count("jobs") == 0 and world.count("idempotency_keys") == world.count("history_events") == 1


@healthy
def jobs_are_about_to_be_pruned(api: FlaskClient, world: World) -> None:
    run_job.run_once(submit(api, n=5))
    expire(350)


@healthy
def an_expired_job_is_still_being_told(api: FlaskClient, world: World) -> None:
    finish(api, HOOK)
    expire(5000)


@healthy
def an_expired_job_has_just_been_told(api: FlaskClient, world: World) -> None:
    deliver_webhook.run_once(finish(api, HOOK), post=lambda *_: Answer(204, None, b""))
    expire(5000)


@healthy
def tombstones_and_keys_are_about_to_go(api: FlaskClient, world: World) -> None:
    world.set(TOMBSTONE_TTL_SECONDS=1000, IDEMPOTENCY_TTL_SECONDS=1000)
    _bury(submit_with_key(api, "one"), 1350)
    put("idempotency_keys", created_at=-1350)


@healthy
def keys_outlive_their_time_with_their_job(api: FlaskClient, world: World) -> None:
    world.set(IDEMPOTENCY_TTL_SECONDS=1000)
    submit_with_key(api, "readable")
    _bury(submit_with_key(api, "buried just now"), 1)
    put("idempotency_keys", created_at=-5000)


@healthy
def keys_outlive_tombstones(api: FlaskClient, world: World) -> None:
    world.set(TOMBSTONE_TTL_SECONDS=10, IDEMPOTENCY_TTL_SECONDS=10**6)
    submit_with_key(api)
    world.sql("DELETE FROM outbox")
    world.sql("DELETE FROM jobs")
    put("idempotency_keys", created_at=-90_000)


@healthy
def notes_wait_for_their_history(api: FlaskClient, world: World) -> None:
    submit_note(api)
    run_job.run_once(submit_note(api))


@healthy
def a_history_failed(api: FlaskClient, world: World) -> None:
    run_job.run_once(submit_note(api))
    put("jobs", status="failed", error_code="crashed", result=None)
    world.sql("DELETE FROM history_events")


@healthy
def a_history_failed_and_was_pruned(api: FlaskClient, world: World) -> None:
    a_history_failed(api, world)
    world.sql("DELETE FROM jobs")
    put("notes", created_at=-86_401)
