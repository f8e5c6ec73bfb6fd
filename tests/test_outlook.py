"""Retry-After is honest: what it says is within a factor of two of what happens, and it costs next to nothing."""
from __future__ import annotations

import contextlib
import heapq
import math
import random
import re
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from statistics import mean
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import insert

from app import (
    clock, db, forecast, ids, jobs, kinds, outlook, presence, redis_client, schema, states, status, submissions,
)
from app.jobs import Job
from tasks import run_job
from tests import statements
from tests.conftest import World, one_database
from tests.processes import Site
from tests.running import a_kind, submit

QUEUE, OTHER = "q:jobs2", "q:other"


class Shop:
    """Slots in simulated time: the submissions, the claims and the ends are the real ones. `takes` is how many seconds
    a kind runs, one tenth more or less; workers that serve several queues take from them in turn."""

    def __init__(self, takes: dict[str, float], *workers: tuple[tuple[str, ...], int]) -> None:
        self.second = 0.0
        self.told: list[tuple[str, float, int]] = []  # job, when it asked, what it was told
        self.ended: dict[str, float] = {}
        self.unfinished: dict[str, None] = {}
        self._takes, self._workers = takes, workers
        self._epoch = clock.now() - timedelta(hours=1)
        self._chance = random.Random(1)
        self._queues: dict[str, deque[str]] = {}
        self._turns = [deque(queues) for queues, _ in workers]
        slots = [number for number, (_, slots) in enumerate(workers) for _ in range(slots)]
        self._due: list[tuple[float, int, int, Job | None]] = [
            (0.0, slot, worker, None) for slot, worker in enumerate(slots)]

    def at(self, second: float) -> datetime:
        return self._epoch + timedelta(seconds=second)

    def submit(self, kind: str, count: int = 1) -> None:
        for _ in range(count):
            self.second += 0.001  # one after the other
            receipt = submissions.submit_job("everybody", kinds.registry()[kind], {}, None, None, self.at(self.second))
            self.unfinished[receipt.job_id] = None
            self._queues.setdefault(kinds.registry()[kind].queue, deque()).append(receipt.job_id)

    def pass_by(self, seconds: float) -> None:
        self.second += seconds
        while self._due[0][0] <= self.second:
            second, slot, worker, held = self._due[0]
            if held is not None:
                with db.transaction() as tx:
                    run_job.write_end(tx, held, run_job.Success("null"), self.at(second))
                self.ended[held.id] = second
                del self.unfinished[held.id]
            if (held := self._claim(worker, second)) is not None:
                takes = self._takes[held.kind] * self._chance.uniform(0.9, 1.1)
                heapq.heapreplace(self._due, (second + takes, slot, worker, held))
            else:
                heapq.heapreplace(self._due, (second + 0.05, slot, worker, None))

    def _claim(self, worker: int, second: float) -> Job | None:
        turns = self._turns[worker]
        for _ in range(len(turns)):
            turns.rotate(-1)
            if waiting := self._queues.get(turns[-1]):
                return run_job.claim(waiting.popleft(), self.at(second))
        return None

    def ask(self) -> None:
        """Every job that is unfinished now asks when it is worth coming back."""
        signs = [{"queues": list(queues), "concurrency": slots} for queues, slots in self._workers]
        now = self.at(self.second)
        with db.reading() as view:
            seen = outlook.look(view, now, signs)
            for job_id in self.unfinished:
                job = jobs.find(view, job_id)
                assert job is not None
                started_at = job.started_at if job.status == "running" else None
                self.told.append((job_id, self.second, seen.seconds_left(job.kind, job.created_at, started_at, now)))

    def work_off(self, seconds: float = 7) -> None:
        """Until everything has ended; all ask every few seconds."""
        while self.unfinished:
            self.ask()
            self.pass_by(seconds)

    def check(self) -> None:
        """Within a factor of two, and the half second that a whole number is off; beyond a minute it is a minute."""
        told = [(estimate, self.ended[job_id] - at, job_id) for job_id, at, estimate in self.told]
        wrong = [(estimate, round(real, 1)) for estimate, real, _ in told
                 if not min(60.0, real) / 2 - 0.5 <= estimate <= 2 * real + 0.5 and not estimate == 1 > real]
        between = [real / estimate for estimate, real, _ in told if 2 <= estimate < 60]
        print(f"{len(told)} estimates, {len(between)} of 2 to 59 s: "
              f"what happened was {min(between):.2f} to {max(between):.2f} of them")
        assert wrong == [] and len(between) > 20


@contextlib.contextmanager
def some_kinds(**queues: str) -> Iterator[list[str]]:
    """A kind on each of these queues."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(a_kind(lambda input, job: None, queue=queue)) for queue in queues.values()]


def test_a_queue_with_a_known_rate_is_foretold(world: World) -> None:
    """Three slots, two seconds a job: 1.5 jobs a second."""
    with some_kinds(a=QUEUE) as (kind,):
        shop = Shop({kind: 2}, ((QUEUE,), 3))
        shop.submit(kind, 20)
        shop.pass_by(20)  # the kind becomes known
        shop.submit(kind, 90)
        shop.pass_by(1)
        shop.work_off()
        shop.check()


@one_database
def test_jobs_that_come_while_others_are_worked_off_are_foretold(world: World) -> None:
    with some_kinds(a=QUEUE) as (kind,):
        shop = Shop({kind: 4}, ((QUEUE,), 2), ((QUEUE,), 2))
        shop.submit(kind, 10)
        shop.pass_by(15)
        for _ in range(12):
            shop.submit(kind, 5)
            shop.pass_by(3)
            shop.ask()
        shop.work_off()
        shop.check()


@one_database
def test_kinds_that_take_longer_than_others_are_foretold(world: World) -> None:
    """Twenty times as long: the short ones behind the long ones wait for them, and not when a slot is free."""
    with some_kinds(short=QUEUE, long=QUEUE) as (short, long):
        shop = Shop({short: 1, long: 20}, ((QUEUE,), 3))
        shop.submit(short, 5)
        shop.submit(long, 2)
        shop.pass_by(50)
        shop.submit(long, 2)
        shop.pass_by(1)
        shop.submit(short, 12)  # one slot is left to them
        shop.ask()
        shop.work_off(3)
        for _ in range(12):
            shop.submit(long)
            shop.submit(short, 3)
        shop.pass_by(1)
        shop.work_off()
        shop.check()


@one_database
@pytest.mark.parametrize("workers", [
    [((QUEUE,), 2), ((OTHER,), 1)],  # nobody shares
    [((QUEUE, OTHER), 2)],  # all slots are shared
], ids=["apart", "shared"])
def test_two_queues_are_foretold(world: World, workers: list[Any]) -> None:
    with some_kinds(mine=QUEUE, other=OTHER) as (mine, other):
        shop = Shop({mine: 1, other: 3}, *workers)
        shop.submit(mine, 5)
        shop.submit(other, 5)
        shop.pass_by(30)
        shop.submit(mine, 40)
        shop.submit(other, 15)
        shop.pass_by(1)
        shop.work_off(5)
        shop.check()


@one_database
def test_many_slots_are_known_by_what_they_run_when_redis_is_silent(world: World) -> None:
    """Nobody says how many there are; those that are busy can be counted."""
    with some_kinds(a=QUEUE) as (kind,):
        shop = Shop({kind: 3}, ((QUEUE,), 8))
        shop.submit(kind, 10)
        shop.pass_by(10)
        shop.submit(kind, 60)
        shop.pass_by(1)
        shop._workers = ()
        shop.ask()
        shop.work_off(100)
        shop.check()


# --- what it says ---


def running(kind: str, seconds: float) -> Any:
    """What a running job is told, `seconds` after its start."""
    now = clock.now()
    with db.reading() as view:
        return outlook.look(view, now, []).seconds_left(kind, now, now - timedelta(seconds=seconds), now)


def known(world: World, kind: str, *seconds: float, ended: datetime | None = None) -> None:
    """Jobs of this kind that have taken so long, the latest last."""
    now = ended or clock.now() - timedelta(hours=1)
    rows = [a_row(kind, states.SUCCEEDED, now, started_at=now + timedelta(seconds=number - each), result="null",
                  finished_at=now + timedelta(seconds=number), expires_at=now + timedelta(days=1))
            for number, each in enumerate(seconds)]
    with db.transaction() as tx:
        tx.execute(insert(schema.jobs), rows)


def a_row(kind: str, state: str, created_at: datetime, **more: Any) -> dict[str, Any]:
    return {
        "id": ids.new_id(created_at), "owner": "everybody", "kind": kind, "queue": QUEUE, "status": state,
        "max_attempts": 3, "time_limit_seconds": 300.0, "input": "{}", "created_at": created_at, **more}


@one_database
@pytest.mark.parametrize("elapsed,says", [(0, 20), (5, 15), (19.9, 1), (20, 1), (26, 6), (65, 45), (1000, 60)])
def test_a_running_job_is_told_the_usual_time_less_what_it_has_had(world: World, elapsed: float, says: int) -> None:
    """One that is late is expected to be late as long again."""
    known(world, "primes", *[18, 22] * 10)
    assert running("primes", elapsed) == says


@one_database
def test_what_counts_is_what_a_kind_took_lately(world: World) -> None:
    known(world, "primes", *[50] * 30, *[4] * 20)
    assert running("primes", 0) == 4
    assert running("history", 0) == 1


@one_database
def test_jobs_that_were_cancelled_before_they_ran_say_nothing_of_how_long_one_takes(
    api: FlaskClient, world: World,
) -> None:
    known(world, "primes", *[10] * 3)
    for job_id in [submit(api, n=5) for _ in range(30)]:
        assert api.post(f"/jobs/{job_id}/cancel").status_code == 200
    assert running("primes", 0) == 10


@one_database
def test_what_lies_beyond_the_places_that_are_looked_at_is_taken_to_be_alike(world: World) -> None:
    known(world, "primes", *[0.03] * 20)
    now = clock.now()
    rows = [a_row("primes", states.QUEUED, now + timedelta(milliseconds=number)) for number in range(9000)]
    with db.transaction() as tx:
        tx.execute(insert(schema.jobs), rows)
    signs = [{"queues": [QUEUE], "concurrency": 10}]
    with db.reading() as view:
        seen = outlook.look(view, now, signs)
    for place in (500, 1999, 2000, 2500, 5000, 8999):
        real = place * 0.035 / 10
        says = seen.seconds_left("primes", rows[place]["created_at"], None, now)
        assert real / 1.2 - 0.5 <= says <= real * 1.2 + 0.5
    assert seen.seconds_left("primes", now + timedelta(hours=1), None, now) == pytest.approx(9000 * 0.0035, abs=3)
    with db.reading() as view:
        alone = outlook.look(view, now, []).seconds_left("primes", rows[-1]["created_at"], None, now)
    assert alone == 60


def test_queues_that_share_a_worker_share_its_slots_with_whoever_shares_them() -> None:
    signs = [{"queues": ["a", "b"], "concurrency": 2}, {"queues": ["c"], "concurrency": 3},
             {"queues": ["b", "d"], "concurrency": 4}, {"queues": ["elsewhere"], "concurrency": 9}]
    found = {frozenset(names): slots for names, slots in forecast.pools({"a", "b", "c", "d", "e"}, signs) if names}
    assert found == {frozenset("abd"): 6, frozenset("c"): 3, frozenset("e"): 0}


# --- where it says it ---

WHOLE = re.compile(r"[1-9][0-9]*")


def told(answer: Any) -> int:
    assert WHOLE.fullmatch(answer.headers["Retry-After"])
    return int(answer.headers["Retry-After"])


def test_it_is_a_whole_number_wherever_a_job_is_unfinished_and_nowhere_else(api: FlaskClient, world: World) -> None:
    known(world, "primes", *[6.4] * 20)
    answers = [api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    job_id = answers[0].json["job_id"]
    outlook.forget()
    answers += [api.get(f"/jobs/{job_id}"), api.head(f"/jobs/{job_id}"),
                api.get(f"/jobs/{job_id}", headers={"If-None-Match": "*"})]
    assert [answer.status_code for answer in answers] == [202, 202, 200, 200, 304]
    assert [told(answer) for answer in answers] == [6] * 5
    held = run_job.claim(job_id, clock.now())
    assert held is not None
    status.write(held)
    for answer in (api.get(f"/jobs/{job_id}"), api.post(f"/jobs/{job_id}/cancel")):
        assert answer.json["status"] == "running" and told(answer) in (5, 6)
    run_job.finish(held, run_job.Success("null"), clock.now)
    for answer in (api.get(f"/jobs/{job_id}"), api.head(f"/jobs/{job_id}"), api.post(f"/jobs/{job_id}/cancel"),
                   api.get(f"/jobs/{job_id}", headers={"If-None-Match": "*"})):
        assert answer.status_code in (200, 304) and "Retry-After" not in answer.headers
    outlook.forget()
    assert told(api.post("/notes", json={"text": "x"})) == 1  # nothing is known of histories


@one_database
def test_a_repeated_submission_is_told_of_the_job_that_it_was_first(api: FlaskClient, world: World) -> None:
    """Not of one that would come last now."""
    known(world, "primes", *[5] * 20)
    first = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    for _ in range(4):
        submit(api, n=5)
    outlook.forget()
    again = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    assert again.headers["Idempotent-Replayed"] and told(again) == told(first) == 5
    assert told(api.post("/jobs", json={"n": 5})) == 30


@one_database
def test_workers_say_in_redis_how_many_slots_there_are(api: FlaskClient, world: World) -> None:
    known(world, "primes", *[5] * 20)
    for _ in range(8):
        submit(api, n=5)
    outlook.forget()
    assert told(api.post("/jobs", json={"n": 5})) == 45
    for name, slots in (("w1", 3), ("w2", 1)):
        presence.give_sign_of_life("worker", name, [QUEUE], slots)
    outlook.forget()
    assert told(api.post("/jobs", json={"n": 5})) == 15


# --- what it costs ---


def test_polling_looks_once_a_second_and_no_more(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = submit(api, n=5)
    outlook.forget()
    now = [0.0]
    monkeypatch.setattr(outlook.time, "monotonic", lambda: now[0])  # the very clock of everything here
    with statements.made_here() as made:
        for step in range(40):
            now[0] = 1000 + step / 10
            redis_client._away_until, redis_client._trouble_at = 0.0, -math.inf
            assert api.get(f"/jobs/{job_id}").status_code == 200
    looks = [statement for statement, _ in made if "ORDER BY jobs.created_at" in statement]
    assert len(looks) == 4  # one queue, four seconds
    assert len(made) <= 4 * 12


def test_a_database_that_is_away_keeps_what_is_known_and_fails_nothing(
    api: FlaskClient, world: World, caplog: pytest.LogCaptureFixture,
) -> None:
    known(world, "primes", *[7] * 20)
    waiting, finished = submit(api, n=5), submit(api, n=5)
    run_job.run_once(finished)
    assert told(api.get(f"/jobs/{waiting}")) >= 3
    outlook._look_again_at = 0.0
    db.dispose()
    world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    before = told(api.get(f"/jobs/{waiting}"))
    assert before >= 3 and "no outlook" in caplog.text
    caplog.clear()
    for _ in range(3):
        assert told(api.get(f"/jobs/{waiting}")) == before
        assert api.get(f"/jobs/{finished}").json["status"] == "succeeded"
    assert "no outlook" not in caplog.text  # it is left alone for some seconds
    outlook.forget()
    assert told(api.get(f"/jobs/{waiting}")) == 1


@one_database
def test_redis_that_is_away_is_not_asked_for_an_outlook(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    known(world, "primes", *[7] * 20)
    job_id = submit(api, n=5)
    presence.give_sign_of_life("worker", "w1", [QUEUE], 2)
    monkeypatch.setattr(redis_client, "_away_until", float("inf"))
    monkeypatch.setattr(redis_client, "client", None)  # whoever used it would fail
    monkeypatch.setattr(presence, "client", None)
    outlook.forget()
    assert told(api.get(f"/jobs/{job_id}")) == 7


@one_database
@pytest.mark.parametrize("sign", ["garbage", "[", "\ufffd"])
def test_a_sign_of_life_that_cannot_be_read_is_none(api: FlaskClient, world: World, sign: str) -> None:
    job_id = submit(api, n=5)
    world.redis.sadd("presence:worker", "w1")
    world.redis.set("presence:worker:w1", sign, ex=presence.PRESENCE_SECONDS)
    outlook.forget()
    assert told(api.get(f"/jobs/{job_id}")) == 1


# --- with real workers ---


@pytest.mark.acceptance
@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_real_workers_keep_to_what_their_clients_were_told(site: Site) -> None:
    """Two slots and jobs that sleep for half a second. A machine that was slow before the clients asked, or became slow
    afterwards, is allowed for by as much as it was."""
    site.start("web", "courier", "beat", "worker")
    site.wait_ready()
    for job_id in [site.submit(kind="nap", seconds=0.5) for _ in range(6)]:
        site.poll(job_id)
    made = [site.submit(kind="nap", seconds=0.5) for _ in range(30)]
    site.poll(made[1])
    asked_at = clock.now()
    estimates = {}
    for job_id in made[-12:]:
        answer = site.get(f"/jobs/{job_id}")
        assert answer.json()["status"] == "queued"
        estimates[job_id] = told(answer)
    for job_id in made:
        site.poll(job_id)
    runs = {job_id: (moment(began), moment(ended))
            for job_id, began, ended in site.sql("SELECT id, started_at, finished_at FROM jobs")}
    ratios = [(runs[job_id][1] - asked_at).total_seconds() / estimate for job_id, estimate in estimates.items()]
    print(f"{len(ratios)} estimates of {min(estimates.values())} to {max(estimates.values())} s: "
          f"what happened was {min(ratios):.2f} to {max(ratios):.2f} of them")
    ends = sorted(ended for _, ended in runs.values() if ended > asked_at)
    slower_before = mean([(ended - began).total_seconds() for began, ended in runs.values() if ended < asked_at]) / 0.5
    slower_since = (ends[-1] - asked_at).total_seconds() / len(ends) * 2 / 0.5
    assert min(estimates.values()) >= 2
    assert 0.5 < min(ratios) * max(1, slower_before) and max(ratios) / max(1, slower_since) < 2


def moment(text: Any) -> datetime:
    return datetime.fromisoformat(str(text)).replace(tzinfo=timezone.utc)


def test_who_waits_for_the_next_attempt_is_told_when_that_is_due(api: FlaskClient, world: World) -> None:
    def fail(input: Any, job: kinds.Job) -> None:
        raise LookupError

    with a_kind(fail) as kind:
        job_id = submit(api, kind)
        run_job.run_once(job_id)
        with db.transaction() as tx:
            tx.execute(schema.outbox.update().values(available_at=clock.now() + timedelta(seconds=20)))
        outlook.forget()
        assert 18 <= int(api.get(f"/jobs/{job_id}").headers["Retry-After"]) <= 20


@one_database
def test_a_burst_is_not_told_what_the_first_of_it_is(api: FlaskClient, world: World) -> None:
    """Between two looks a process counts what it has accepted itself."""
    world.set(WEB_WORKERS=1)
    for _ in range(3):
        job_id = submit(api, n=5)
        run_job.run_once(job_id)
    world.sql("UPDATE jobs SET started_at = :at", at=(clock.now() - timedelta(seconds=2)).replace(tzinfo=None))
    outlook.forget()
    outlook.latest()
    outlook._look_again_at = float("inf")
    said = [int(api.post("/jobs", json={"n": 5}).headers["Retry-After"]) for _ in range(20)]
    assert said == sorted(said) and 1 <= said[0] <= 4 and 30 <= said[-1] <= 50
    outlook.forget()
    assert 30 <= int(api.post("/jobs", json={"n": 5}).headers["Retry-After"]) <= 50  # so it is


@one_database
def test_a_repetition_whose_job_is_done_has_nothing_to_wait_for(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    keyed = {"json": {"n": 6}, "headers": {"Idempotency-Key": "k"}}
    run_job.run_once(job_id)
    world.sql("UPDATE jobs SET started_at = :at", at=(clock.now() - timedelta(seconds=9)).replace(tzinfo=None))
    outlook.forget()
    first = api.post("/jobs", **keyed)
    assert int(first.headers["Retry-After"]) >= 8
    run_job.run_once(first.json["job_id"])
    assert api.post("/jobs", **keyed).headers["Retry-After"] == "1"
