"""Nothing accepted is lost and nothing takes effect twice, whatever dies: with the Procfile's own processes."""
from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
import redis
from pysqlite3 import dbapi2

from tests import faults, servers
from tests.faults import Fault, Town
from tests.processes import Process, Site
from tests.servers import Valkey, wait_until

pytestmark = pytest.mark.acceptance

LEASE, RESCUE = 2, 1  # of the fixture `site`


def runs(site: Site, which: str = "") -> list[str]:
    """Which attempts of kind `trace` have begun (or `.ended`), as they wrote it down themselves."""
    log = Path(site.env["TRACE_LOG"] + which)
    return log.read_text().splitlines() if log.exists() else []


def wait_running(site: Site, job_id: str, attempt: int = 1) -> None:
    def running() -> bool:
        job = site.get(f"/jobs/{job_id}").json()
        return (job["status"], job["attempt"]) == ("running", attempt)

    wait_until(running, 30, f"attempt {attempt} runs")


def claimed_nothing(*workers: Process) -> int:
    """How many messages came to these workers that had nothing to claim."""
    return sum(worker.output().count('"nothing to claim"') for worker in workers)


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """kill -STOP of all of it, then -CONT."""
    family = process.family()
    for one in family:
        one.suspend()
    try:
        yield
    finally:
        for one in family:
            one.resume()


def test_a_worker_that_was_frozen_beyond_its_lease_cannot_finish(site: Site) -> None:
    """Its late end is refused, the other attempt's result stands, one callback goes out."""
    site.start("web", "courier", "beat", "hooksink")
    frozen = site.start_alone("worker")
    site.wait_ready()
    job_id = site.submit(kind="trace", seconds=2, callback_url=f"{site.hook}/")
    wait_running(site, job_id)
    with stopped(frozen):
        other = site.start_alone("worker")
        assert site.poll(job_id)["result"] == {"attempt": 2}
    wait_until(lambda: '"attempt lost"' in frozen.output(), what="the late end is refused")
    assert site.get(f"/jobs/{job_id}").json()["result"] == {"attempt": 2}
    assert runs(site) == [f"{job_id} 1", f"{job_id} 2"]
    for worker in (frozen, other):  # both go on
        assert worker.popen.poll() is None
    jobs = [site.submit(kind="trace", seconds=0.2) for _ in range(8)]
    assert {site.poll(job_id)["attempt"] for job_id in jobs} == {1}
    wait_until(lambda: site.get(f"/jobs/{job_id}").json()["callback"]["status"] == "delivered")
    assert len(site.hooks()) == 1


def test_a_death_is_noticed_when_the_lease_is_over_and_the_job_runs_again_at_once(site: Site) -> None:
    site.start("web", "courier", "beat")
    workers = [site.start_alone("worker") for _ in range(2)]
    site.wait_ready()
    wait_until(lambda: "2 alive" in site.get("/health/ready").text, what="both workers are there")
    job_id = site.submit(kind="trace", seconds=1.5)
    wait_running(site, job_id)
    ((held_by,),) = site.sql("SELECT worker FROM jobs")
    (dying,) = [worker for worker in workers if f":{worker.popen.pid}:" in held_by]
    dying.kill()
    died = datetime.now(timezone.utc)
    job = site.poll(job_id)
    assert job["attempt"] == 2
    waited = (datetime.fromisoformat(job["started_at"]) - died).total_seconds()
    assert waited <= LEASE + RESCUE + 1.5  # a tick is as late as the machine is busy


def test_a_long_job_with_a_living_worker_is_never_started_twice(site: Site) -> None:
    """The broker hands its message out again after the visibility timeout; there is nothing to claim."""
    site.env["BROKER_VISIBILITY_TIMEOUT_SECONDS"] = "5"
    site.start("web", "courier", "beat")
    workers = [site.start_alone("worker")]
    site.wait_ready()
    job_id = site.submit(kind="held", seconds=60)
    wait_running(site, job_id)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 6, what="the visibility timeout is over")
    workers.append(site.start_alone("worker"))  # a consumer that starts has such messages handed out
    wait_until(lambda: claimed_nothing(*workers) > 0, 40, "the message came again")
    Path(site.env["TRACE_LOG"] + ".enough").touch()
    assert site.poll(job_id)["result"] == {"attempt": 1}
    assert runs(site) == [f"{job_id} 1"]


def test_a_worker_that_must_stop_releases_what_it_cannot_finish(site: Site) -> None:
    """Within WORKER_STOP_SECONDS, for others to run at once, and not held against the job's attempts: whether the
    supervisor asks the worker, or all of its processes (Heroku, systemd)."""
    site.env["WORKER_STOP_SECONDS"] = "1"
    site.start("web", "courier", "beat")
    worker = site.start_alone("worker")
    site.wait_ready()
    long = site.submit(kind="once", seconds=3)  # of 1 attempt
    for attempt, stop in enumerate((os.kill, os.killpg), 1):
        wait_running(site, long, attempt)
        short = site.submit(kind="once", seconds=0.3)
        wait_running(site, short)
        stop(worker.popen.pid, signal.SIGTERM)
        assert worker.popen.wait(10) == 0
        assert site.get(f"/jobs/{long}").json()["status"] == "queued"
        worker = site.start_alone("worker")
        assert site.poll(short)["result"] == {"attempt": 1}
    assert site.poll(long)["result"] == {"attempt": 3}
    assert [run for run in runs(site, ".ended") if long in run] == [f"{long} 3"]  # what was released ran nowhere else


def test_twenty_restarts_of_everything_lose_nothing_and_repeat_nothing(site: Site) -> None:
    """Each time 20 jobs are submitted and every line is asked to stop while its successor starts."""
    lines = ("worker", "courier", "beat")
    site.env["WORKER_STOP_SECONDS"] = "2"
    site.start_alone("hooksink")
    web = site.start_alone("web")
    site.wait_answering()
    running = [site.start_alone(line) for line in lines]
    jobs: list[str] = []
    for round in range(20):
        jobs += [site.submit(kind="trace", seconds=0.05, callback_url=f"{site.hook}/") for _ in range(20)]
        if round % 5 == 4:
            web.stop()
            web = site.start_alone("web")
            site.wait_answering()
        for process in running:
            process.popen.terminate()
        leaving, running = running, [site.start_alone(line) for line in lines]
        for process in leaving:
            assert process.popen.wait(20) in (0, -signal.SIGTERM)  # the latter when it had only just begun
    assert {site.poll(job_id)["status"] for job_id in jobs} == {"succeeded"}
    assert len(set(jobs)) == 400 and sorted(runs(site)) == sorted(f"{job_id} 1" for job_id in jobs)
    wait_until(lambda: len(site.hooks()) >= 400, 60, "every callback")
    assert Counter(line.split()[1] for line in site.hooks()) == {f"job_id={job_id}": 1 for job_id in jobs}


def test_many_of_each_line_do_each_thing_once(site: Site) -> None:
    """Two beats, three relays, four workers, and a time zone of its own for each."""
    zones = iter(("Pacific/Kiritimati", "America/Anchorage", "Asia/Tokyo", "Europe/Paris", "UTC") * 2)
    site.env["WORKER_CONCURRENCY"] = "1"

    def start(line: str) -> Process:
        site.env["TZ"] = next(zones)
        return site.start_alone(line)

    for line in ("web", "beat", "beat", "courier", "courier", "courier"):
        start(line)
    workers = [start("worker") for _ in range(4)]
    site.start_alone("hooksink")
    site.wait_ready()
    jobs = [site.submit(kind="trace", seconds=0, callback_url=f"{site.hook}/") for _ in range(200)]
    assert {(job := site.poll(job_id))["status"] + str(job["attempt"]) for job_id in jobs} == {"succeeded1"}
    assert sorted(runs(site)) == sorted(f"{job_id} 1" for job_id in jobs)
    wait_until(lambda: len(site.hooks()) == 200, what="every callback")
    assert claimed_nothing(*workers) == 0
    assert not any("duplicate" in line for line in site.hooks())


# --- the broker ---


class Submitting:
    """A client that goes on submitting and reading for the time of the block; each job is done at once."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.jobs: list[str] = []
        self.answers: Counter[tuple[str, int]] = Counter()
        self.slowest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk)

    def __enter__(self) -> Submitting:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _talk(self) -> None:
        with self.site.client() as session:
            while not self._over.wait(0.1):
                began = time.monotonic()
                answer = session.post(f"{self.site.api}/jobs", json={"kind": "trace", "seconds": 0}, timeout=30)
                self.answers["POST", answer.status_code] += 1
                self.slowest = max(self.slowest, time.monotonic() - began)
                if answer.status_code == 202:
                    self.jobs.append(answer.json()["job_id"])
                    poll = session.get(f"{self.site.api}/jobs/{self.jobs[-1]}", timeout=30)
                    self.answers["GET", poll.status_code] += 1


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """Lines that nobody starts again, on a broker of their own."""
    folder = tmp_path_factory.mktemp("town")
    with servers.valkey() as own, Site(
        folder, REDIS_URL=own.url, JOB_MODULES="tests.slow_kinds", LEASE_SECONDS=LEASE, RESCUE_INTERVAL_SECONDS=RESCUE,
        TRACE_LOG=folder / "trace.log",
    ) as site:
        made = Town(site, folder, Random(1), LEASE, 0.25, valkey=own)
        made.stacks = [site.start_alone(line) for line in ("web", "courier", "beat", "worker")]
        site.wait_ready()
        yield made


@pytest.mark.parametrize("fault", faults.BROKER_FAULTS, ids=lambda fault: fault.__name__)
def test_a_broker_in_trouble_is_survived_by_everybody(town: Town, fault: Fault) -> None:
    """202 within 2 s and polls from SQL meanwhile; afterwards all goes on, without a restart of anything."""
    with Submitting(town.site) as client:
        wait_until(lambda: len(client.jobs) >= 3)
        fault(town)
        before = len(client.jobs)
        wait_until(lambda: len(client.jobs) > before + 3)
    assert set(client.answers) == {("POST", 202), ("GET", 200)}
    assert client.slowest < 2
    if fault is faults.leave_a_mutex_behind:  # which kills a worker, too
        town.stacks.append(town.site.start_alone("worker"))
    for job_id in client.jobs:
        assert town.site.poll(job_id)["status"] == "succeeded"
    town.site.wait_ready()
    alive = [process for process in town.stacks if process.popen.poll() is None]
    assert len(alive) == 4
    if fault is not faults.leave_a_mutex_behind:
        assert sorted(run for run in runs(town.site) if run.split()[0] in client.jobs) == sorted(
            f"{job_id} 1" for job_id in client.jobs)


# --- the database ---


@contextmanager
def held(site: Site) -> Iterator[None]:
    """Somebody else's long transaction: it writes to SQLite, or holds PostgreSQL's jobs table."""
    url = site.env["DATABASE_URL"]
    if url.startswith("sqlite"):
        with closing(dbapi2.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.rollback()
    else:
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            connection.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            yield
            connection.rollback()


def test_a_database_that_others_hold_is_a_clear_503_and_loses_nothing(site: Site) -> None:
    site.start("web", "courier", "beat", "worker")
    site.wait_ready()
    running = [site.submit(kind="trace", seconds=1) for _ in range(2)]
    wait_running(site, running[1])
    with held(site):
        refused = site.post("/jobs", {"kind": "trace", "seconds": 0}, Idempotency_Key="k")
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.headers["Content-Type"] == "application/problem+json"
    accepted = site.post("/jobs", {"kind": "trace", "seconds": 0}, Idempotency_Key="k")
    assert accepted.status_code == 202 and "Idempotent-Replayed" not in accepted.headers
    for job_id in (*running, accepted.json()["job_id"]):
        assert site.poll(job_id)["status"] == "succeeded"
    assert {run.split()[0] for run in runs(site)} == {*running, accepted.json()["job_id"]}


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_database_that_is_restarted_under_load_loses_nothing(tmp_path: Path, valkey: Valkey, mode: str) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    with servers.postgres() as server, Site(
        tmp_path, REDIS_URL=valkey.url, JOB_MODULES="tests.slow_kinds", LEASE_SECONDS=LEASE,
        RESCUE_INTERVAL_SECONDS=RESCUE, TRACE_LOG=tmp_path / "trace.log",
        DATABASE_URL=server.url(server.new_database()),
    ) as site:
        site.start("web", "courier", "beat", "worker")
        site.wait_ready()
        with Submitting(site) as client:
            wait_until(lambda: len(client.jobs) > 10)
            server.restart(mode)
            before = len(client.jobs)
            wait_until(lambda: len(client.jobs) > before + 10)
        assert set(client.answers) <= {("POST", 202), ("GET", 200), ("POST", 503), ("GET", 503)}
        for job_id in client.jobs:
            assert site.poll(job_id)["status"] == "succeeded"
        assert all(process.popen.poll() is None for process in site.running)
