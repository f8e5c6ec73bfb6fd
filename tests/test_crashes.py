"""Whichever process dies, and wherever: after recovery nothing tells that it did."""
from __future__ import annotations

import base64
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import kinds, presence
from tasks import deliver_webhook, publishing, relay_outbox, rescue_stalled, run_job
from tests import crashing
from tests.conftest import World
from tests.crashing import Flow
from tests.receiver import Receiver
from tests.running import a_kind, kind, later
from tests.servers import wait_until


@dataclass(frozen=True)
class Step:
    """Where a process dies, and what that costs: everything else is as if it had lived."""

    act: str
    seam: str
    kept: bool = True  # whether the submission stands; if not, it has left nothing at all
    attempts: int = 1  # of the job
    tries: int = 1  # of the callback
    hooks: int = 1  # that came, all of one webhook id

    def __str__(self) -> str:
        return f"{self.act}, {self.seam}"


# The way through the house, for every flow. A transaction, publish or POST that is not here fails a test below.
STEPS = (
    Step("submit", "before commit 1", kept=False),
    Step("submit", "after commit 1"),  # the client has no answer: it asks again, and gets the first one
    Step("publish the job", "before commit 1"),
    Step("publish the job", "after commit 1"),  # claimed by a relay that is no more
    Step("publish the job", "before publish"),
    Step("publish the job", "after publish"),  # nobody has noted it: it is published twice
    Step("publish the job", "before commit 2"),
    Step("publish the job", "after commit 2"),
    Step("run", "before commit 1"),  # the message has died with the worker
    Step("run", "after commit 1", attempts=2),  # claimed: the attempt counts
    Step("run", "in mid-run", attempts=2),
    Step("run", "before commit 2", attempts=2),  # done, and it cannot be known
    Step("run", "after commit 2"),
    Step("publish the callback", "before commit 1"),
    Step("publish the callback", "after commit 1"),
    Step("publish the callback", "before publish"),
    Step("publish the callback", "after publish"),
    Step("publish the callback", "before commit 2"),
    Step("publish the callback", "after commit 2"),
    Step("deliver", "before commit 1"),
    Step("deliver", "after commit 1", tries=2),
    Step("deliver", "before POST", tries=2),
    Step("deliver", "after POST", tries=2, hooks=2),  # it has come, and it cannot be known: at least once
    Step("deliver", "before commit 2", tries=2, hooks=2),
    Step("deliver", "after commit 2"),
)
every_step = pytest.mark.parametrize("step", STEPS, ids=str)

TABLES = ("jobs", "outbox", "idempotency_keys", "notes", "history_events", "deliveries", "delivery_attempts")
UNFINISHED = {"jobs": "status IN ('queued', 'running')", "deliveries": "state IN ('pending', 'sending')",
              "outbox": "1 = 1"}
# Each round of the recovery is so much later: beyond every lease, and a callback's first two waits.
ROUND_SECONDS = 40
ROUNDS = 10

Passed = Callable[[str, str], None]  # is told act and seam, in order


@dataclass
class House:
    """The world with its doors, and every message that the broker ever handed out."""

    world: World
    api: FlaskClient
    receiver: Receiver
    messages: list[tuple[str, str]] = field(default_factory=list)

    def flow(self, path: str, kind: kinds.Kind, /, **body: Any) -> Flow:
        return Flow(path, {**body, "callback_url": self.receiver.url}, kind)

    def take(self) -> list[tuple[str, str]]:
        """Every message that is in the broker, as a consumer takes it: task and id."""
        taken = []
        for queue in ("q:jobs2", "callbacks"):
            while (raw := self.world.redis.rpop(queue)) is not None:
                message = json.loads(raw)
                arguments = json.loads(base64.b64decode(message["body"]))[0]
                taken.append((message["headers"]["task"].removeprefix("tasks."), arguments[0]))
        self.messages += taken
        return taken


@pytest.fixture
def house(world: World, api: FlaskClient, receiver: Receiver) -> House:
    return House(world, api, receiver)


# --- the way there, the death, the recovery ---


def lead(house: House, flow: Flow, until: str = "", reached: Passed = lambda act, seam: None) -> str:
    """All goes well up to this act, or to the end; returns what the act's message names."""
    for act in crashing.ACTS:
        target = house.take()[0][1] if act in ("run", "deliver") else ""
        if act == until:
            return target
        crashing.perform(act, flow, target, lambda seam: reached(act, seam))
        if act == "run":
            run_job.run_once(target)  # a flow may take a second attempt
    return ""


def crash(house: House, flow: Flow, step: Step) -> None:
    target = lead(house, flow, until=step.act)
    die(house, step.act, step.seam, flow, target)
    if not step.kept:
        assert {table: house.world.count(table) for table in TABLES} == dict.fromkeys(TABLES, 0)


def die(house: House, act: str, seam: str, flow: Flow, target: str) -> None:
    assert crashing.die(act, seam, flow, target) == -signal.SIGKILL
    # PostgreSQL hears of a death from the kernel, a moment later; until then the dead hold their locks.
    wait_until(lambda: house.world.dialect == "sqlite" or house.world.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND xact_start IS NOT NULL") == [(0,)])


def recover(house: House) -> None:
    """What the living processes do, round after round, each so much later, until nothing is left to do."""
    memory: dict[str, datetime] = {}
    for number in range(1, ROUNDS + 1):
        moment = later(ROUND_SECONDS * number)
        presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 1)
        presence.give_sign_of_life("courier", "c@h", ["relay", "callbacks"], 4)
        rescue_stalled.run_once(moment, memory)
        relay_outbox.drain(publishing.publish, now=lambda: moment)
        for message in house.take():
            consume(message, moment)
        if left(house) == dict.fromkeys(UNFINISHED, 0):
            return
    raise AssertionError(f"after {ROUNDS} rounds there is {left(house)}")


def left(house: House) -> dict[str, int]:
    return {table: house.world.count(table, where) for table, where in UNFINISHED.items()}


def consume(message: tuple[str, str], moment: datetime) -> None:
    task, target = message
    if task == "run_job":
        run_job.run_once(target, now=lambda: moment)
    else:
        deliver_webhook.run_once(target, now=lambda: moment)


# --- what must be so in the end, for every flow and every step ---


def crash_and_recover(house: House, flow: Flow, step: Step) -> dict[str, Any]:
    """The whole story; returns the job as it is in the end, without its callback."""
    crash(house, flow, step)
    if step.act == "submit":
        answer = flow.submit(house.api)
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (202, step.kept)
    recover(house)
    for message in list(house.messages):  # those that a dead worker had not acknowledged come again
        consume(message, later(ROUND_SECONDS * (ROUNDS + 1)))
    assert left(house) == dict.fromkeys(UNFINISHED, 0) and house.take() == []
    return final_job(house, flow, step)


def final_job(house: House, flow: Flow, step: Step) -> dict[str, Any]:
    path = flow.submit(house.api).headers["Location"]  # the client may ask again at any time
    assert (house.world.count("jobs"), house.world.count("idempotency_keys")) == (1, 1)
    seen = house.api.get(path).json
    house.world.redis.flushall()
    job = house.api.get(path).json
    assert job.pop("callback") == {"status": "delivered", "attempts": step.tries, "last_response": 204}
    assert {**seen, "callback": None} == {**job, "callback": None}  # a callback's state may be seconds old
    told_once(house, job, step)
    return job


def told_once(house: House, job: dict[str, Any], step: Step) -> None:
    """The receiver knows of one event, however often it came, and it is the job as clients read it."""
    ((webhook_id, state),) = house.world.sql("SELECT id, state FROM deliveries")
    assert state == "delivered"
    assert [hook.headers["webhook-id"] for hook in house.receiver.hooks] == [webhook_id] * step.hooks
    for hook in house.receiver.hooks:
        assert json.loads(hook.body) == {"type": f"job.{job['status']}", "timestamp": job["finished_at"], **job}
    tries = house.api.get(f"/jobs/{job['job_id']}/deliveries").json["deliveries"]
    assert [(row["attempt"], row["response_code"]) for row in tries] == [
        *((number, None) for number in range(1, step.tries)), (step.tries, 204)]


# --- the flows ---


@every_step
def test_a_job_ends_in_the_same_state_wherever_a_process_dies(house: House, step: Step) -> None:
    job = crash_and_recover(house, house.flow("/jobs", kind("primes"), n=5), step)
    assert (job["status"], job["result"], job["attempt"]) == ("succeeded", {"n": 5, "count": 3}, step.attempts)


@every_step
def test_a_note_has_one_history_wherever_a_process_dies(house: House, step: Step) -> None:
    job = crash_and_recover(house, house.flow("/notes", kind("history"), text="x"), step)
    assert (job["status"], job["attempt"], house.world.count("notes")) == ("succeeded", step.attempts, 1)
    assert house.api.get(f"/notes/{job['note_id']}").json["text"] == "x"
    events = house.api.get(f"/notes/{job['note_id']}/events").json["events"]
    assert [(event["kind"], event["job_id"]) for event in events] == [("created", job["job_id"])]


@every_step
def test_a_job_that_fails_uses_up_its_attempts_wherever_a_process_dies(house: House, step: Step) -> None:
    with a_kind(crashing.give_up, max_attempts=2) as name:
        job = crash_and_recover(house, house.flow("/jobs", kind(name), kind=name), step)
    assert (job["status"], job["attempt"]) == ("failed", 2)
    assert job["error"] == {"code": "exception", "message": "LookupError: no luck"}


@pytest.mark.parametrize("step", [step for step in STEPS if step.act == "run"], ids=str)
def test_a_job_whose_last_attempt_dies_has_crashed_and_tells_so(house: House, step: Step) -> None:
    """The other steps are as in the test above."""
    with a_kind(crashing.give_up, max_attempts=1) as name:
        job = crash_and_recover(house, house.flow("/jobs", kind(name), kind=name), step)
    lost = step.attempts > 1  # the one attempt that there is
    assert (job["status"], job["attempt"]) == ("failed", 1)
    assert job["error"]["code"] == ("crashed" if lost else "exception")


@pytest.fixture(params=["a job", "a note", "a job that fails"])
def flow(request: pytest.FixtureRequest, house: House) -> Iterator[Flow]:
    with a_kind(crashing.give_up, max_attempts=2) as name:
        yield {
            "a job": house.flow("/jobs", kind("primes"), n=5),
            "a note": house.flow("/notes", kind("history"), text="x"),
            "a job that fails": house.flow("/jobs", kind(name), kind=name),
        }[request.param]


def test_the_table_names_every_seam_of_every_flow(house: House, flow: Flow) -> None:
    passed: list[tuple[str, str]] = []
    lead(house, flow, reached=lambda act, seam: passed.append((act, seam)))
    assert passed == [(step.act, step.seam) for step in STEPS]
    assert left(house) == dict.fromkeys(UNFINISHED, 0) and len(house.receiver.hooks) == 1


# --- what a client may ask for beside: each is one transaction ---

ASKED_SEAMS = ("before commit 1", "after commit 1")
every_asked_seam = pytest.mark.parametrize("seam", ASKED_SEAMS)


def ask_again(house: House, act: str, job_id: str, code: int) -> None:
    """The client has no answer from whoever died."""
    assert house.api.post(f"/jobs/{job_id}/{act}").status_code == code
    recover(house)
    for message in list(house.messages):
        consume(message, later(ROUND_SECONDS * (ROUNDS + 1)))
    assert left(house) == dict.fromkeys(UNFINISHED, 0) and house.take() == []


@every_asked_seam
@pytest.mark.parametrize("attempts", [0, 1], ids=["queued", "running"])
def test_a_job_is_cancelled_once_wherever_a_process_dies(house: House, seam: str, attempts: int) -> None:
    flow = house.flow("/jobs", kind("primes"), n=5)
    job_id = lead(house, flow, until="run")
    if attempts:  # and its worker dies too
        die(house, "run", "in mid-run", flow, job_id)
    die(house, "cancel", seam, flow, job_id)
    ask_again(house, "cancel", job_id, 200)
    job = house.api.get(f"/jobs/{job_id}").json
    assert (job["status"], job["error"]["code"], job["attempt"]) == ("failed", "cancelled", attempts)
    job.pop("callback")
    told_once(house, job, Step("cancel", seam))


@every_asked_seam
def test_an_end_is_told_once_more_wherever_a_process_dies(house: House, seam: str) -> None:
    flow = house.flow("/jobs", kind("primes"), n=5)
    lead(house, flow)
    job_id = house.world.sql("SELECT id FROM jobs")[0][0]
    die(house, "redeliver", seam, flow, job_id)
    ask_again(house, "redeliver", job_id, 202)
    first, second = house.receiver.hooks
    assert first.body == second.body and first.headers["webhook-id"] != second.headers["webhook-id"]
    assert house.world.sql("SELECT state, count(*) FROM deliveries GROUP BY state") == [("delivered", 2)]


def test_each_of_them_is_one_transaction(house: House) -> None:
    flow, passed = house.flow("/jobs", kind("primes"), n=5), list[str]()
    lead(house, flow)
    other = house.api.post("/jobs", json={"n": 5}).json["job_id"]
    crashing.perform("redeliver", flow, house.world.sql("SELECT id FROM jobs WHERE status <> 'queued'")[0][0],
                     passed.append)
    crashing.perform("cancel", flow, other, passed.append)
    assert passed == [*ASKED_SEAMS] * len(crashing.ASKED)
