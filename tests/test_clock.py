"""The beat: each entry once when it is due, whatever stood still before, and whatever the broker has been through."""
from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery
from flask.testing import FlaskClient

from app import clock
from tasks import broker, celery, rescue_stalled, run_job
from tasks.broker import Clock
from tests import servers
from tests.conftest import World, one_database
from tests.processes import Process, Site
from tests.running import a_kind, die_in_mid_job, later, relay, submit
from tests.servers import wait_until

ENTRIES = ["tasks.prune_expired", "tasks.relay_outbox", "tasks.rescue_stalled"]


class Time:
    """Celery's time, which a test moves."""

    def __init__(self) -> None:
        self.now = clock.now()

    def __call__(self) -> datetime:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def moment(world: World, monkeypatch: pytest.MonkeyPatch) -> Time:
    moment = Time()
    monkeypatch.setattr(celery.app, "now", moment)
    return moment


def run_due(beat: Clock) -> None:
    """What the beat does until it would sleep."""
    for _ in range(1000):
        if beat.tick() > 0:
            return
    raise AssertionError("it never sleeps")


def taken(client: redis.Redis) -> list[str]:
    """The tasks of the messages that wait in the courier's queue, which a courier then takes."""
    messages = client.lrange("relay", 0, -1)
    client.delete("relay")
    return sorted(json.loads(message)["headers"]["task"] for message in messages)


# --- standing still ---


@one_database
def test_a_beat_that_stood_still_owes_one_tick_of_each(world: World, moment: Time) -> None:
    beat = Clock(app=celery.app)
    run_due(beat)
    assert taken(world.redis) == []  # nothing is due at the start
    moment.passes(600)
    run_due(beat)
    assert taken(world.redis) == ENTRIES
    moment.passes(0.9)
    run_due(beat)
    assert taken(world.redis) == []  # none of them was owed more than one
    moment.passes(0.2)
    run_due(beat)
    assert taken(world.redis) == ["tasks.relay_outbox"]


@one_database
def test_a_schedule_that_was_not_looked_at_for_ten_minutes_owes_one_tick_of_each(world: World, moment: Time) -> None:
    """As the stand-still, but the order of what comes next is made anew as well."""
    beat = Clock(app=celery.app)
    for entry in beat.schedule.values():
        entry.last_run_at -= timedelta(seconds=600)
    run_due(beat)
    assert taken(world.redis) == ENTRIES
    run_due(beat)
    assert taken(world.redis) == []


@one_database
def test_every_tick_comes_in_its_interval(world: World, moment: Time) -> None:
    beat = Clock(app=celery.app)
    seen: Counter[str] = Counter()
    for _ in range(600):
        run_due(beat)
        seen.update(taken(world.redis))
        moment.passes(0.2)
    assert 110 <= seen["tasks.relay_outbox"] <= 120
    assert 22 <= seen["tasks.rescue_stalled"] <= 24
    assert 1 <= seen["tasks.prune_expired"] <= 2


@one_database
def test_a_system_clock_that_is_set_back_does_not_stop_it(world: World, moment: Time) -> None:
    beat = Clock(app=celery.app)
    run_due(beat)
    moment.passes(-600)
    for _ in range(3):
        run_due(beat)
        moment.passes(1.1)
    run_due(beat)
    assert taken(world.redis).count("tasks.relay_outbox") == 3


# --- no courier ---


@one_database
def test_without_a_courier_ticks_do_not_pile_up_and_with_one_they_come_again(world: World, moment: Time) -> None:
    beat = Clock(app=celery.app)
    for _ in range(50):
        moment.passes(5)
        run_due(beat)
    assert world.redis.llen("relay") == broker._TICKS_WAITING + 1
    taken(world.redis)
    run_due(beat)
    assert taken(world.redis) == []  # what was left out is not made up for
    moment.passes(5)
    run_due(beat)
    assert taken(world.redis) == ENTRIES[1:]


# --- the broker in trouble ---


@pytest.fixture
def own() -> Iterator[servers.Valkey]:
    """A broker of its own, which a test may mistreat."""
    with servers.valkey() as server:
        yield server


@pytest.fixture
def quick(own: servers.Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A beat on that broker whose intervals are short."""
    monkeypatch.setattr(broker, "AGAIN_SECONDS", 0.1)
    app = Celery("quick", set_as_current=False)
    app.config_from_object("celeryconfig")
    app.conf.broker_url = own.url
    app.conf.beat_schedule = {"relay": {
        "task": "tasks.relay_outbox", "schedule": 0.1, "options": {"queue": "relay", "expires": 0.1}}}
    yield Clock(app=app)
    app.close()


def comes(beat: Clock, client: redis.Redis) -> None:
    """Waits until a tick has come, as often as the beat's own loop would look."""
    def one() -> list[str]:
        beat.tick()
        return taken(client)

    wait_until(one, what="a tick")


def test_ticks_come_again_when_the_brokers_connections_were_killed(own: servers.Valkey, quick: Clock) -> None:
    with redis.Redis.from_url(own.url, decode_responses=True) as client:
        for _ in range(3):
            comes(quick, client)
            assert client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") >= 1
        comes(quick, client)


def test_ticks_come_again_when_the_broker_was_a_replica_for_a_while(own: servers.Valkey, quick: Clock) -> None:
    """As in a failover: it takes nothing, then it takes everything."""
    with redis.Redis.from_url(own.url, decode_responses=True) as client:
        comes(quick, client)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for _ in range(5):
            quick.tick()  # raises nothing, which would end the beat
        assert client.llen("relay") == 0
        client.execute_command("REPLICAOF", "NO", "ONE")
        comes(quick, client)


def test_ticks_come_again_when_the_broker_was_away(
    own: servers.Valkey, quick: Clock, caplog: pytest.LogCaptureFixture,
) -> None:
    """For longer than any of the libraries' own tries."""
    with redis.Redis.from_url(own.url, decode_responses=True) as client, ThreadPoolExecutor(1) as beat:
        comes(quick, client)
        own.stop()
        ticking = beat.submit(run_until_a_tick_is_due, quick)
        wait_until(lambda: ticking.done() or "the broker is away" in caplog.text)
        own.start()
        ticking.result(20)  # raises nothing, which would end the beat
        comes(quick, client)


def run_until_a_tick_is_due(beat: Clock) -> None:
    wait_until(lambda: beat.tick() == 0)


# --- time zones ---


@pytest.fixture(params=["Pacific/Kiritimati", "America/Anchorage"])
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """A machine whose time zone is far from UTC."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = request.param
    time.tzset()
    try:
        assert abs(time.localtime().tm_gmtoff) >= 8 * 3600
        yield request.param
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def test_ticks_know_no_time_zone(zone: str, own: servers.Valkey, quick: Clock) -> None:
    with redis.Redis.from_url(own.url, decode_responses=True) as client:
        began = time.monotonic()
        for _ in range(5):
            comes(quick, client)
        assert 0.3 <= time.monotonic() - began < 10  # neither a burst nor hours apart
        wait_until(lambda: (quick.tick(), client.llen("relay"))[1])
        headers = json.loads(client.lindex("relay", 0))["headers"]
    assert abs(datetime.fromisoformat(headers["expires"]) - clock.now()) < timedelta(seconds=10)


def test_leases_and_due_times_know_no_time_zone(zone: str, world: World, api: FlaskClient) -> None:
    assert abs(clock.now().timestamp() - time.time()) < 10
    with a_kind(lambda input, job: None) as kind:
        job_id = submit(api, kind)
        assert relay(later(-1)) == [] and relay() == [("run_job", job_id)]
        die_in_mid_job(job_id)
        assert rescue_stalled.run_once(later(29), {}) == 0  # the lease stands
        assert rescue_stalled.run_once(later(31), {}) == 1
        assert relay(later(30)) == [] and relay(later(31)) == [("run_job", job_id)]
        before = clock.now()
        after = run_job.run_once(job_id)
    assert after is not None and after.started_at is not None and after.finished_at is not None
    assert before <= after.started_at <= after.finished_at <= clock.now()
    shown = api.get(f"/jobs/{job_id}").json
    assert abs(datetime.fromisoformat(shown["finished_at"]) - clock.now()) < timedelta(seconds=10)
    assert world.redis.pttl(f"job:{job_id}") > 13_000


def test_a_wait_knows_no_time_zone(zone: str, world: World, api: FlaskClient) -> None:
    """A second attempt is due after its backoff; not hours sooner or later."""
    def fail(input: Any, job: Any) -> None:
        raise ValueError("again")

    with a_kind(fail) as kind:
        job_id = submit(api, kind)
        run_job.run_once(job_id)
    assert relay() == [] and relay(later(2)) == [("run_job", job_id)]


# --- the process ---


@pytest.mark.acceptance
def test_a_beat_process_survives_bad_files_and_a_stand_still(tmp_path: Path, own: servers.Valkey) -> None:
    """What other schedulers leave in the folder is neither read nor touched; after the stand-still no burst comes."""
    rubbish = [tmp_path / name for name in ("celerybeat-schedule", "celerybeat-schedule.db", "celerybeat.pid")]
    for file in rubbish:
        file.write_bytes(b"\x00rubbish")
    interval = 0.2
    with (Site(tmp_path, REDIS_URL=own.url, RELAY_INTERVAL_SECONDS=interval) as site,
          redis.Redis.from_url(own.url, decode_responses=True) as client):
        beat = site.run("beat", "--chdir", str(tmp_path), "python", "-m", "tasks", "beat")  # where its files would be
        wait_until(lambda: client.llen("relay") > broker._TICKS_WAITING, what="ticks that nobody takes")
        longest = most_waiting(client, 5 * interval)
        assert longest == broker._TICKS_WAITING + 1

        with standing_still(beat):
            taken(client)
            threading.Event().wait(12 * interval)
        began = time.monotonic()
        came = arrivals(client, 5 * interval)
        assert 2 <= came <= (time.monotonic() - began) / interval + 3  # relays, and what else was due meanwhile
        assert beat.popen.poll() is None
        assert [file.read_bytes() for file in rubbish] == [b"\x00rubbish"] * 3


def most_waiting(client: redis.Redis, seconds: float) -> int:
    most, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        most = max(most, client.llen("relay"))
    return most


def arrivals(client: redis.Redis, seconds: float) -> int:
    """Takes every tick that comes, as a courier does; returns how many came."""
    came, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        came += client.blpop(["relay"], timeout=seconds) is not None
    return came


@contextlib.contextmanager
def standing_still(process: Process) -> Iterator[None]:
    process.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.popen.pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        process.popen.send_signal(signal.SIGCONT)
