"""Whoever changes a job, its messages and its callbacks at one moment with others: nobody waits for whom it holds up.

PostgreSQL has locks a row; SQLite has one writer, who never waits with anything held."""
from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, db, jobs, kinds, outbox, presence
from tasks import celery, deliver_webhook, prune_expired, relay_outbox, rescue_stalled, run_job
from tasks.egress import Answer
from tests.asking import all_at_once, another, cancel, nothing_is_wrong, redeliver
from tests.conftest import World
from tests.running import a_kind, die_in_mid_job, later, relay, submit
from tests.servers import wait_until

pytestmark = pytest.mark.parametrize("world", ["postgresql"], indirect=True)


def deadlocks(world: World) -> int:
    return world.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0]


@contextmanager
def meanwhile(world: World, call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Has somebody do this, who waits for a lock when the block begins; gives a list of what came of it."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(call()))
    thread.start()
    wait_until(lambda: world.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ) != [(0,)], what="it waits")
    yield outcome
    thread.join()


def test_a_repeated_message_that_comes_as_an_attempt_ends_leaves_no_row(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    die_in_mid_job(job_id)
    with db.transaction() as tx:
        after = jobs.requeue(tx, jobs.find(tx, job_id))
        with meanwhile(world, lambda: run_job.run_once(job_id)) as outcome:
            run_job.follow_up(tx, after, clock.now(), clock.now())
            tx.commit()
    assert (outcome[0].status, outcome[0].attempt) == ("succeeded", 2)
    assert world.count("outbox") == deadlocks(world) == 0


@pytest.mark.parametrize("first", [False, True])
def test_a_claim_that_waits_for_the_relay_settles_its_row(api: FlaskClient, world: World, first: bool) -> None:
    """The relay says that it has published a message while that is claimed."""
    job_id = submit(api, n=5)
    with db.transaction() as tx:
        (row,) = outbox.claim(tx, "relay", clock.now(), later(15), 9)
    with db.transaction() as tx:
        assert outbox.mark_published(tx, [row], clock.now()) == 1
        with meanwhile(world, lambda: run_job.claim(job_id, clock.now(), first)) as outcome:
            tx.commit()
    assert (outcome[0].status, outcome[0].attempt, outcome[0].published_at) == ("running", 1, row.available_at)
    assert world.count("outbox") == deadlocks(world) == 0


def test_a_cancellation_waits_for_a_claim_and_holds_nothing_that_it_needs(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    with db.transaction() as tx:
        jobs.hold(tx, job_id)
        with meanwhile(world, lambda: cancel(another(api), job_id)) as outcome:
            outbox.settle(tx, "run_job", job_id)
            assert jobs.start(tx, job_id, "w", clock.now(), later(30), None) is not None
            tx.commit()
    assert (outcome[0].status_code, outcome[0].json["status"], deadlocks(world)) == (200, "running", 0)


def test_a_message_whose_job_is_being_moved_is_not_lost(api: FlaskClient, world: World) -> None:
    """The rescue holds the message, so it does not wait for the job."""
    job_id = submit(api, n=5)
    relay()
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 1)
    rescue = functools.partial(rescue_stalled._republish_lost_of, "q:jobs2", later(100))
    memory = {"q:jobs2": clock.now()}
    with db.transaction() as tx:
        jobs.hold(tx, job_id)
        assert rescue(memory) == 0
    assert rescue(memory) == 1 and relay(later(100)) == [("run_job", job_id)]


@pytest.mark.parametrize("moving,helped", [(60, 190), (120, 0)])
def test_messages_whose_jobs_are_being_moved_do_not_hide_those_behind_them(
    api: FlaskClient, world: World, moving: int, helped: int,
) -> None:
    """At one look, unless a whole batch of the oldest is: that is over by the next one."""
    made = [submit(api, n=5) for _ in range(250)]
    relay()
    world.sql("UPDATE outbox SET published_at = published_at - interval '1 s' WHERE target_id = ANY(:oldest)",
              oldest=made[:moving])
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 1)
    rescue = functools.partial(rescue_stalled._republish_lost_of, "q:jobs2", later(100))
    with db.transaction() as tx:
        for job_id in made[:moving]:
            jobs.hold(tx, job_id)
        assert rescue({"q:jobs2": clock.now()}) == helped
    assert rescue({"q:jobs2": clock.now()}) == 250 - helped
    assert {target for _, target in relay(later(100))} == set(made)


# --- all of it at once ---

SECONDS = 3.0
JOBS_AT_ONCE = 6  # few, so that they meet
HOOK = "http://127.0.0.1:9/"


def now_and_then_fails(input: Any, job: kinds.Job) -> str:
    time.sleep(random.uniform(0, 0.01))
    if random.random() < 0.3:
        raise LookupError
    return "a result"


def test_nobody_waits_for_whom_it_holds_up(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9", CALLBACK_SCHEDULE_SECONDS="0,0,0")
    with a_kind(now_and_then_fails, max_attempts=5) as name:
        answers = storm(api, name)
        assert {code for _, code in answers} <= {200, 202, 409, 410}
        assert {("cancel", 200), ("redeliver", 202)} <= answers.keys() and deadlocks(world) == 0
        world.sql("UPDATE outbox SET state = 'waiting', published_at = NULL WHERE state = 'published'")  # all lost
        while due := relay(later(20_000)):  # what has stepped back for a second, too
            for task, target in due:
                run(task, target)
        assert world.count("jobs", "status IN ('queued', 'running')") == world.count("outbox") == 0
    assert world.count("deliveries", "state IN ('pending', 'sending')") == 0 and nothing_is_wrong(world)


def run(task: str, target: str) -> None:
    if task == "run_job":
        run_job.run_once(target)
    else:
        deliver_webhook.run(
            target, now=lambda: later(10_000), post=lambda *_: Answer(random.choice([204, 503, 410]), None, b""))


def storm(api: FlaskClient, name: str) -> Counter[tuple[str, int]]:
    """Everybody at once, for some seconds; returns how often clients were answered how. Raises what anybody raised."""
    answers: Counter[tuple[str, int]] = Counter()
    published: list[tuple[str, str]] = []
    ids = [submit(api, name, callback_url=HOOK) for _ in range(JOBS_AT_ONCE)]

    def client() -> None:
        ids.append(submit(another(api), name, callback_url=HOOK))
        time.sleep(0.02)

    def ask(what: Callable[..., Any]) -> None:
        answers[what.__name__, what(another(api), random.choice(ids[-JOBS_AT_ONCE:])).status_code] += 1

    def consumer() -> None:
        run(*random.choice(published[-30:] or [("run_job", ids[-1])]))

    def repeated_message() -> None:
        run_job.run_once(random.choice(ids[-JOBS_AT_ONCE:]))

    def relays() -> None:
        relay_outbox.drain(
            lambda *rows: published.extend((row.task, row.target_id) for row in rows), now=lambda: later(60))

    def rescue() -> None:
        rescue_stalled.run_once(later(31), {})

    def stop_a_worker() -> None:
        run_job.release_all(celery.NAME, clock.now())

    def prune() -> None:
        time.sleep(0.2)
        prune_expired.run_once(later(86_401))

    until = time.monotonic() + SECONDS

    def again_and_again(act: Callable[[], None]) -> None:
        while time.monotonic() < until:
            act()

    actors = [client, *[functools.partial(ask, cancel)] * 2, *[functools.partial(ask, redeliver)] * 2, *[consumer] * 4,
              repeated_message, *[relays] * 2, *[rescue] * 2, stop_a_worker, prune]
    all_at_once(functools.partial(again_and_again, act) for act in actors)
    return answers
