"""The Redis view beside SQL: late, stale, evicted or broken, it never shows an older state for long, and never again
one that was over."""
from __future__ import annotations

import os
import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, db, deliveries, jobs, redis_client, states, status
from app.jobs import Job
from tasks import run_job
from tests.conftest import World, one_database
from tests.running import a_kind, submit
from tests.servers import wait_until

LIVES = status.UNFINISHED_TTL_SECONDS * 1000  # milliseconds


def stored(job_id: str) -> Job:
    with db.reading() as view:
        job = jobs.find(view, job_id)
    assert job is not None
    return job


def aged(job: Job, seconds: float) -> Job:
    """As a process has it that read it so long ago, and stood still since."""
    return replace(job, as_of=clock.now() - timedelta(seconds=seconds))


def shown(world: World, job_id: str) -> str | None:
    return world.redis.hget(status.key(job_id), "status")


def a_life(api: FlaskClient) -> list[Job]:
    """Every state of a job that fails once and then succeeds."""
    def work(input: Any, job: Any) -> None:
        states.append(stored(job.id))
        if job.attempt == 1:
            raise ValueError("again")

    states: list[Job] = []
    with a_kind(work) as kind:
        job_id = submit(api, kind)
        states.append(stored(job_id))
        run_job.run_once(job_id)
        states.append(stored(job_id))
        run_job.run_once(job_id)
        states.append(stored(job_id))
    assert [job.status for job in states] == ["queued", "running", "queued", "running", "succeeded"]
    return states


# --- late writes ---


@one_database
def test_in_whatever_order_the_states_are_written_the_last_one_is_shown(api: FlaskClient, world: World) -> None:
    life = a_life(api)
    for order in itertools.permutations(life):
        world.redis.flushall()
        newest = -1
        for job in order:
            status.write(job)
            newest = max(newest, job.version)
            assert world.redis.hget(status.key(job.id), "version") == str(newest)
        assert shown(world, life[0].id) == "succeeded"


def test_a_state_from_long_ago_is_not_shown_even_when_nothing_is(api: FlaskClient, world: World) -> None:
    """Nothing is left in Redis that could tell that it is over: its age does."""
    for job in a_life(api)[:-1]:
        world.redis.flushall()  # evicted, expired
        status.write(aged(job, status.UNFINISHED_TTL_SECONDS + 0.1))
        assert not world.redis.exists(status.key(job.id))
        assert api.get(f"/jobs/{job.id}").json["status"] == "succeeded"


@one_database
@pytest.mark.parametrize("age", [0, 4, 9])
def test_a_state_is_shown_for_what_is_left_of_its_seconds(api: FlaskClient, world: World, age: float) -> None:
    job = stored(submit(api, n=5))
    world.redis.flushall()
    late = aged(job, age)
    status.write(late)
    left = LIVES - (clock.now() - late.as_of).total_seconds() * 1000
    assert left - 100 <= world.redis.pttl(status.key(job.id)) <= LIVES - age * 1000


@one_database
@pytest.mark.parametrize("seconds", [1, 60, 86_400])
def test_a_clock_that_runs_ahead_shows_a_state_no_longer(api: FlaskClient, world: World, seconds: float) -> None:
    job = stored(submit(api, n=5))
    world.redis.flushall()
    status.write(aged(job, -seconds))
    assert 0 < world.redis.pttl(status.key(job.id)) <= LIVES


@one_database
def test_a_late_write_does_not_lengthen_what_it_may_not_cover(api: FlaskClient, world: World) -> None:
    *_, running, final = a_life(api)
    world.redis.pexpire(status.key(final.id), 5000)
    status.write(running)
    status.write(aged(running, 60))
    assert shown(world, final.id) == "succeeded"
    assert 0 < world.redis.pttl(status.key(final.id)) <= 5000


@one_database
def test_a_final_state_does_not_age(api: FlaskClient, world: World) -> None:
    """It is the truth whenever it is written."""
    final = a_life(api)[-1]
    world.redis.flushall()
    status.write(aged(final, 3600))
    assert shown(world, final.id) == "succeeded"
    assert LIVES < world.redis.pttl(status.key(final.id)) <= status.FINAL_TTL_SECONDS * 1000


# --- callbacks ---


@one_database
def test_a_final_job_is_shown_shortly_until_its_callback_has_ended(api: FlaskClient, world: World) -> None:
    """Its callback's state will change yet."""
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    job_id = submit(api, n=5, callback_url="http://127.0.0.1:9/")
    run_job.run_once(job_id)
    assert 0 < world.redis.pttl(status.key(job_id)) <= LIVES
    with db.reading() as view:
        job, pending = jobs.find(view, job_id), deliveries.latest_of_job(view, job_id)
    assert job is not None and pending is not None
    for state in (states.PENDING, states.SENDING, states.DELIVERED, states.EXHAUSTED, states.GONE, states.REFUSED):
        ended = None if state in states.UNFINISHED_DELIVERIES else clock.now()
        world.redis.flushall()
        status.write(job, replace(pending, state=state, finished_at=ended))
        left = world.redis.pttl(status.key(job_id))
        assert 0 < left <= LIVES if ended is None else LIVES < left <= status.FINAL_TTL_SECONDS * 1000
        world.redis.flushall()
        status.write(aged(job, 60), replace(pending, state=state, finished_at=ended))
        assert world.redis.exists(status.key(job_id)) == (ended is not None)


# --- what is in Redis is gone, or was never ours ---


def spoil(world: World, key: str, how: str) -> None:
    version = world.redis.hget(key, "version")
    assert version is not None
    if how == "expired":
        world.redis.pexpire(key, 1)
        wait_until(lambda: not world.redis.exists(key))
    elif how != "no document":
        world.redis.delete(key)
    if how == "text":
        world.redis.set(key, "succeeded")
    elif how == "list":
        world.redis.rpush(key, "a", "b")
    elif how == "no document":
        world.redis.hdel(key, "document")
    elif how == "garbage":
        world.redis.hset(key, mapping={"owner": "everybody", "document": "{", "version": version})
    elif how == "a future status":
        text = f'{{"job_id": "{key[4:]}", "status": "paused"}}'
        world.redis.hset(key, mapping={"owner": "everybody", "document": text, "version": version})


@pytest.mark.parametrize("how,heals", [
    ("deleted", True), ("expired", True), ("no document", True), ("garbage", True), ("a future status", True),
    ("text", False), ("list", False),  # somebody else's: it is not touched
])
def test_what_redis_holds_instead_of_the_job_is_no_answer(
    api: FlaskClient, world: World, how: str, heals: bool,
) -> None:
    for job_id, expected in ((submit(api, n=5), "queued"), (a_life(api)[-1].id, "succeeded")):
        key = status.key(job_id)
        spoil(world, key, how)
        for _ in range(2):
            answer = api.get(f"/jobs/{job_id}")
            assert (answer.status_code, answer.json["status"]) == (200, expected)
        if heals:
            assert shown(world, job_id) == expected
            assert 0 < world.redis.pttl(key) <= (LIVES if expected == "queued" else status.FINAL_TTL_SECONDS * 1000)


def at_once(*works: Callable[[], None]) -> None:
    """Runs all of these at one time; what one of them raises is raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


@one_database
def test_every_hash_ends_however_many_write_at_once(api: FlaskClient, world: World) -> None:
    life = a_life(api)
    written = [replace(job, id=f"{job.id[:-1]}{last}") for job in life for last in "0123456789"] * 4
    random.Random(1).shuffle(written)
    assert len(written) == 200

    def write(share: list[Job]) -> Callable[[], None]:
        return lambda: [status.write(job) for job in share] and None

    at_once(*(write(written[number::8]) for number in range(8)))
    keys = [status.key(job.id) for job in written]
    assert all(0 < world.redis.pttl(key) <= status.FINAL_TTL_SECONDS * 1000 for key in keys)
    assert {world.redis.hget(key, "status") for key in keys} == {"succeeded"}


def test_pollers_never_see_a_final_job_return_while_hashes_are_evicted(world: World) -> None:
    """Redis forgets at any moment; what was final once stays it, for everyone who looks."""
    from app.api import create_app

    application = create_app()
    finals: dict[str, dict[str, Any]] = {}  # what some poller has seen; each looks here before it asks
    running = threading.Event()
    running.set()
    seen: set[str] = set()

    def work(input: Any, job: Any) -> None:
        for step in range(3):
            job.progress(step, 3)
            threading.Event().wait(0.01)
        if job.attempt == 1:
            raise ValueError("again")

    def run(share: list[str]) -> Callable[[], None]:
        def run_all() -> None:
            for job_id in share * 2:  # two attempts
                run_job.run_once(job_id)
        return run_all

    def poll(number: int) -> Callable[[], None]:
        def poll_all() -> None:
            client, chance = application.test_client(), random.Random(number)
            while running.is_set() or len(finals) < len(made):
                job_id = chance.choice(made)
                known = finals.get(job_id)
                document = client.get(f"/jobs/{job_id}").json
                seen.add(document["status"])
                assert known is None or document == known
                if document["status"] in states.FINAL:
                    finals[job_id] = document
        return poll_all

    def evict() -> None:
        chance = random.Random(0)
        while running.is_set():
            world.redis.delete(status.key(chance.choice(made)))

    def work_all() -> None:
        try:
            at_once(*(run(made[number::4]) for number in range(4)))
        finally:
            running.clear()

    world.redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with a_kind(work) as kind:
            made = [submit(application.test_client(), kind) for _ in range(20)]
            at_once(work_all, evict, *(poll(number) for number in range(4)))
    finally:
        world.redis.config_set("maxmemory-policy", "noeviction")
    assert len(finals) == 20 and {"running", "succeeded"} <= seen


@one_database
def test_an_end_that_was_read_while_redis_was_away_is_not_taken_back(api: FlaskClient, world: World) -> None:
    """Redis comes back with the state before it: its end was never told to it."""
    job_id = submit(api, n=5)
    shown, there = world.redis.hgetall(f"job:{job_id}"), os.environ["REDIS_URL"]
    world.set(REDIS_URL="redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    run_job.run_once(job_id)
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"
    world.set(REDIS_URL=there)
    redis_client._client.cache_clear()
    redis_client._away_until = 0.0
    assert world.redis.hgetall(f"job:{job_id}") == shown and shown["status"] == "queued"
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"


def test_what_is_over_is_kept_in_the_view_for_long_only_when_it_is_asked_for(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    key = status.key(job_id)
    assert LIVES < world.redis.pttl(key) <= status.ENDED_TTL_SECONDS * 1000
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"
    assert world.redis.pttl(key) <= status.ENDED_TTL_SECONDS * 1000  # it was there anyway
    world.redis.delete(key)
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"
    assert status.ENDED_TTL_SECONDS * 1000 < world.redis.pttl(key) <= status.FINAL_TTL_SECONDS * 1000
