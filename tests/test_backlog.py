"""A deep backlog: waiting long is no sign of loss. Hours of a slow worker pass here in simulated time; the claims, the
ends, the relay and the rescue are the real ones."""
from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from sqlalchemy import insert, literal, select

from app import clock, db, ids, jobs, presence, schema, states
from app.config import settings
from app.jobs import Job
from tasks import celery, relay_outbox, republishing, rescue_stalled, run_job
from tests.conftest import World
from tests.running import Broker

DEEP = 50_000
PUBLISHED_PER_SECOND = 5
SLOTS = 2
QUEUE, OTHER = "q:jobs2", "q:other"
SLOW = (20.0, 60.0)  # seconds that a job takes
HOUR = 3600.0  # the broker's visibility timeout, the longest of all


class Worker:
    """Two slots: each claims a message, holds its job, ends it, and takes the next one up to three seconds later."""

    def __init__(self, name: str, queues: dict[str, deque[str]], takes: tuple[float, float], starts_at: float) -> None:
        self.name, self.queues, self.takes = name, queues, takes
        self.ended = 0
        self._chance = random.Random(name)
        self._due: list[tuple[float, int, Job | None]] = [(starts_at, slot, None) for slot in range(SLOTS)]

    @property
    def held(self) -> list[Job]:
        return [job for _, _, job in self._due if job is not None]

    def give_sign_of_life(self) -> None:
        presence.give_sign_of_life("worker", self.name, list(self.queues), SLOTS)

    def work_until(self, then: float, at: Callable[[float], datetime]) -> None:
        """Every claim and every end that is due until then, in the order of time; then the heartbeats."""
        while self._due[0][0] <= then:
            second, slot, held = self._due[0]
            if held is not None:
                self.end(held, at(second))
                after = (second + self._chance.uniform(0, 3), slot, None)
            elif (held := self._claim(at(second))) is not None:
                after = (second + self._chance.uniform(*self.takes), slot, held)
            else:
                after = (second + 1, slot, None)
            heapq.heapreplace(self._due, after)
        with db.transaction() as tx:
            for held in self.held:
                jobs.extend_lease(tx, held, at(then) + timedelta(seconds=settings().lease_seconds), None, None)

    def _claim(self, now: datetime) -> Job | None:
        celery.NAME = self.name  # put back by the fixture
        for queue in self.queues.values():
            while queue:
                if (held := run_job.claim(queue.popleft(), now)) is not None:
                    return held
        return None

    def end(self, held: Job, now: datetime) -> None:
        with db.transaction() as tx:
            run_job.write_end(tx, held, run_job.Success("null"), now)
        self.ended += 1


class Hours:
    """Simulated time: at each RESCUE_INTERVAL_SECONDS the workers have worked, the rescue looks, and the relay
    publishes what has become due. `queues` are the broker's: first in, first out, unless a test moves a message."""

    def __init__(self, world: World) -> None:
        self.second = 0.0
        self.queues: dict[str, deque[str]] = {}
        self.workers: list[Worker] = []
        self.published: list[str] = []  # since the backlog was made
        self.queue_of: dict[str, str] = {}
        self._world = world
        self._epoch = clock.now() - timedelta(hours=12)
        self._started = 0
        self._signs_end_at: dict[str, float] = {}
        self._memory: dict[str, datetime] = {}

    def at(self, second: float) -> datetime:
        return self._epoch + timedelta(seconds=second)

    def submit(self, queue: str, count: int) -> list[str]:
        """Queued jobs, published one after the other until now."""
        made = [ids.new_id(clock.now()) for _ in range(count)]
        rows = [{
            "id": job_id, "owner": "everybody", "kind": "primes", "queue": queue, "status": states.QUEUED,
            "max_attempts": 3, "time_limit_seconds": 300.0, "input": '{"n": 5}',
            "created_at": self.at(self.second + number / PUBLISHED_PER_SECOND)} for number, job_id in enumerate(made)]
        job = schema.jobs.c
        published = select(
            literal(states.RUN_JOB), job.id, job.queue, literal(states.PUBLISHED),
            job.created_at, job.created_at, job.created_at).where(job.queue == queue)
        with db.transaction() as tx:
            tx.execute(insert(schema.jobs), rows)
            tx.execute(insert(schema.outbox).from_select(
                ["task", "target_id", "queue", "state", "available_at", "published_at", "created_at"], published))
        self._world.sql("ANALYZE")  # as a server that has grown slowly has done
        self.queues.setdefault(queue, deque()).extend(made)
        self.second += count / PUBLISHED_PER_SECOND
        return made

    def start(self, *queues: str, takes: tuple[float, float] = SLOW, boots: float = 8) -> Worker:
        """A worker that shows itself at once and takes its first messages when it has booted."""
        self._started += 1
        served = {name: self.queues[name] for name in queues}
        self.workers.append(Worker(f"w{self._started}@h", served, takes, self.second + boots))
        return self.workers[-1]

    def stop(self, worker: Worker) -> None:
        """It ends what it runs and takes nothing more."""
        for held in worker.held:
            worker.end(held, self.at(self.second))
        self.workers.remove(worker)
        presence.withdraw_sign_of_life("worker", worker.name)

    def kill(self, worker: Worker) -> None:
        """Its jobs stay as they are, and its sign of life stands for a while."""
        self.workers.remove(worker)
        self._signs_end_at[worker.name] = self.second + presence.FRESH_SECONDS

    def pass_until_a_slot_is_free(self, worker: Worker) -> None:
        while len(worker.held) == SLOTS:
            self.pass_by(0.5)

    def pass_by(self, seconds: float) -> None:
        until, interval = self.second + seconds, settings().rescue_interval_seconds
        while (tick := (self.second // interval + 1) * interval) <= until:
            self.second = tick
            self._tick()
        self.second = until
        for worker in self.workers:
            worker.work_until(until, self.at)

    def _tick(self) -> None:
        for worker in self.workers:
            worker.work_until(self.second, self.at)
            worker.give_sign_of_life()
        for name, end in self._signs_end_at.items():
            if end <= self.second:
                presence.withdraw_sign_of_life("worker", name)
        if rescue_stalled.run_once(self.at(self.second), self._memory):
            self._relay()

    def _relay(self) -> None:
        broker = Broker()
        relay_outbox.drain(broker.publish, now=lambda: self.at(self.second))
        for row in broker.rows:
            self.queues[row.queue].append(row.target_id)
            self.queue_of[row.target_id] = row.queue
            self.published.append(row.target_id)


@pytest.fixture
def hours(world: World, monkeypatch: pytest.MonkeyPatch) -> Hours:
    monkeypatch.setattr(celery, "NAME", celery.NAME)
    return Hours(world)


def test_a_backlog_that_is_worked_off_for_hours_is_published_once(hours: Hours, world: World) -> None:
    """Longer than every timeout, with the moments between two jobs, and a worker that is started anew."""
    world.set(RESCUE_INTERVAL_SECONDS=10)  # half as often as by default: the hours pass sooner
    hours.submit(QUEUE, DEEP)
    began = hours.second
    first = hours.start(QUEUE)
    hours.pass_by(1.1 * HOUR)
    hours.stop(first)
    hours.pass_by(60)
    second = hours.start(QUEUE)
    hours.pass_by(0.2 * HOUR)
    ended = first.ended + second.ended
    print(f"{ended} of {DEEP} jobs in {(hours.second - began) / HOUR:.1f} hours: "
          f"{len(hours.published)} messages published again")
    assert ended > 200
    assert hours.published == []


def test_messages_that_got_lost_in_a_backlog_are_published_again_once_each(hours: Hours) -> None:
    """Each when consumption has passed it; and no other message."""
    waiting = hours.submit(QUEUE, DEEP)
    lost = waiting[20:120:10]
    for job_id in lost:
        hours.queues[QUEUE].remove(job_id)
    hours.start(QUEUE, takes=(4, 12))
    found_at: list[int] = []
    while len(hours.published) < len(lost) and hours.second < DEEP / PUBLISHED_PER_SECOND + HOUR:
        hours.pass_by(60)
        found_at.append(len(hours.published))
    assert hours.published == lost
    assert len(set(found_at)) > 5  # one after the other, as consumption passes them
    hours.pass_by(300)
    print(f"{len(lost)} of {DEEP} messages lost: {len(hours.published)} published again")
    assert hours.published == lost


def test_a_message_put_to_the_end_of_the_queue_is_published_again_once(hours: Hours) -> None:
    """The broker gave it to a worker that left. Nobody can tell it from a lost one; the second message is harmless."""
    waiting = hours.submit(QUEUE, 5000)
    hours.queues[QUEUE].rotate(-1)
    hours.start(QUEUE, takes=(4, 12))
    hours.pass_by(0.25 * HOUR)
    assert hours.published == waiting[:1]


def test_a_message_that_comes_after_it_was_published_again_is_no_sign_of_progress(hours: Hours) -> None:
    """It was held by a worker that stood still, or went another way. What was published before its second message, and
    waits for its turn, is not lost."""
    waiting = hours.submit(QUEUE, 5000)
    held_back = hours.queues[QUEUE].popleft()
    hours.start(QUEUE)
    while not hours.published and hours.second < 5000 / PUBLISHED_PER_SECOND + HOUR:
        hours.pass_by(60)
    assert hours.published == waiting[:1]
    hours.queues[QUEUE].appendleft(held_back)
    hours.pass_by(300)
    assert hours.published == waiting[:1]


def test_a_killed_workers_messages_that_come_back_are_no_sign_of_progress(hours: Hours) -> None:
    """Its jobs wait for another attempt at the end of the queue; then the broker brings their first messages back, to
    the head of it."""
    hours.submit(QUEUE, 5000)
    killed = hours.start(QUEUE)
    hours.pass_by(120)
    hours.kill(killed)
    in_its_hands = [job.id for job in killed.held]
    hours.pass_by(60)
    hours.start(QUEUE)
    hours.pass_by(60)
    assert Counter(hours.published) == Counter(in_its_hands)  # their second attempts
    hours.queues[QUEUE].extendleft(in_its_hands)
    hours.pass_by(0.1 * HOUR)
    assert Counter(hours.published) == Counter(in_its_hands)


@pytest.mark.parametrize("back_after", [4, 60])
def test_a_worker_that_was_killed_between_two_jobs_has_no_free_slot(hours: Hours, back_after: float) -> None:
    """Its sign of life stands for some seconds more; nobody takes messages in its name."""
    hours.submit(QUEUE, 5000)
    killed = hours.start(QUEUE)
    hours.pass_by(120)
    hours.pass_until_a_slot_is_free(killed)
    hours.kill(killed)
    hours.pass_by(back_after)
    hours.start(QUEUE, boots=0)
    hours.pass_by(120)
    assert Counter(hours.published) == Counter(job.id for job in killed.held)


def test_a_queue_whose_worker_is_busy_with_another_queue_is_not_lost(hours: Hours) -> None:
    hours.submit(OTHER, 1000)
    hours.submit(QUEUE, 1000)
    worker = hours.start(OTHER, QUEUE)
    hours.pass_by(0.5 * HOUR)
    assert worker.ended > 50
    assert hours.published == []


# --- all of it is lost ---


def test_a_broker_that_lost_a_backlog_gets_it_again_at_one_look(hours: Hours) -> None:
    """However busy the workers are from then on."""
    waiting = hours.submit(QUEUE, 450)
    hours.queues[QUEUE].clear()
    hours.start(QUEUE)
    hours.pass_by(30)
    assert Counter(hours.published) == Counter(waiting)
    hours.pass_by(300)
    assert len(hours.published) == len(waiting)


def test_a_backlog_that_is_lost_once_more_comes_back_once_more(hours: Hours) -> None:
    waiting = hours.submit(QUEUE, 450)
    hours.queues[QUEUE].clear()
    worker = hours.start(QUEUE, takes=(4, 12))
    hours.pass_by(60)
    assert worker.ended > 0 and Counter(hours.published) == Counter(waiting)
    left = list(hours.queues[QUEUE])
    hours.queues[QUEUE].clear()
    hours.pass_by(60)
    assert Counter(hours.published) == Counter(waiting) + Counter(left)


def test_a_backlog_is_not_multiplied_for_a_worker_that_takes_nothing(hours: Hours) -> None:
    """It shows itself and its free slots, and no message reaches it. Once all may be lost; then it gets little."""
    waiting, seconds = hours.submit(QUEUE, 1000), 60
    hours.start(QUEUE, boots=HOUR)
    hours.pass_by(20)
    assert Counter(hours.published) == Counter(waiting)
    hours.pass_by(seconds)
    again = len(hours.published) - len(waiting)
    assert 0 < again <= republishing.BATCH * seconds / settings().rescue_interval_seconds


def test_a_look_that_must_end_leaves_the_rest_to_the_next_one_and_forgets_no_queue(
    hours: Hours, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although by then the workers are busy with what they got."""
    monkeypatch.setattr(republishing, "LONGEST_SECONDS", 0.0)
    for queue in (OTHER, QUEUE):
        hours.submit(queue, 250)
        hours.queues[queue].clear()
        hours.start(queue)
    found: list[Counter[str]] = []
    while len(hours.published) < 500 and len(found) < 10:
        began = len(hours.published)
        hours.pass_by(5)
        found.append(Counter(hours.queue_of[job_id] for job_id in hours.published[began:]))
    assert [each for each in found if each] == [{OTHER: number, QUEUE: number} for number in (100, 100, 50)]
