"""What a submission hands to the relay with its wake token: published at once, without a claim, and nothing hangs on
it."""
from __future__ import annotations

import threading
from typing import Any

import pytest
from flask.testing import FlaskClient
from kombu.exceptions import OperationalError as BrokerAway

from app import clock, db, kinds, outbox, waking
from app.outbox import Row
from tasks import publishing, relay_outbox, run_job
from tests.conftest import World, one_database
from tests.running import a_kind, later, relay, submit


def messages(world: World) -> int:
    return world.redis.llen("q:jobs2")


def states(world: World) -> dict[str, str]:
    return dict(world.sql("SELECT target_id, state FROM outbox"))


@pytest.fixture(autouse=True)
def nothing_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_outbox, "_unmarked", relay_outbox.Unmarked())
    monkeypatch.setattr(relay_outbox, "_claimed", relay_outbox.Claimed())


def test_a_token_says_what_the_outbox_says(api: FlaskClient, world: World) -> None:
    for body in ({"n": 5}, {"n": 5, "callback_url": "http://127.0.0.1:9/"}):
        world.set(CALLBACK_ALLOW="127.0.0.1:9")
        assert api.post("/jobs", json=body).status_code == 202
    assert api.post("/notes", json={"text": "é", "callback_url": "http://127.0.0.1:9/"}).status_code == 202
    assert api.post("/notes", json={"text": "é"}).status_code == 202
    handed = [row for rows in waking.take() for row in rows]
    with db.transaction() as tx:
        waiting = outbox.claim(tx, "a", clock.now(), later(9), 9)
    told = ("task", "target_id", "queue", "time_limit_seconds", "available_at", "together")
    assert len(handed) == 4
    assert [[getattr(row, name) for name in told] for row in handed] == [
        [getattr(row, name) for name in told] for row in waiting]


def test_what_is_handed_over_is_published_once_and_marked_before_the_next_claim(
    api: FlaskClient, world: World,
) -> None:
    job_id = submit(api, n=5)
    assert relay_outbox._work(waking.take()) == 1
    assert messages(world) == 1 and states(world) == {job_id: "waiting"}
    another = submit(api, n=6)  # its token comes later
    assert relay_outbox._work([[]]) == 1
    assert messages(world) == 2 and states(world) == {job_id: "published", another: "leased"}
    assert relay_outbox._work(waking.take()) == 0
    relay_outbox._mark_all()
    assert messages(world) == 2 and states(world) == {job_id: "published", another: "published"}


def test_what_is_claimed_before_it_is_marked_needs_no_mark(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    relay_outbox._work(waking.take())
    before = clock.now()
    after = run_job.run_once(job_id)
    assert after is not None and after.published_at is not None and after.published_at < before
    relay_outbox._mark_all()
    assert states(world) == {}


def test_what_was_staged_anew_meanwhile_is_not_marked(api: FlaskClient, world: World) -> None:
    """The message of the next attempt is not the one that was published."""
    def fail(input: Any, job: Any) -> None:
        raise ValueError

    with a_kind(fail, max_attempts=2) as kind:
        job_id = submit(api, kind)
        relay_outbox._work(waking.take())
        assert run_job.run_once(job_id) is not None
        relay_outbox._mark_all()
        assert states(world) == {job_id: "waiting"}
        assert relay(later(600)) == [("run_job", job_id)]


def test_a_token_that_got_lost_delays_until_the_next_tick(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    world.redis.delete(waking.KEY)
    assert relay_outbox._work([[]]) == 1 and messages(world) == 1 and states(world) == {job_id: "leased"}


@one_database
def test_a_relay_that_dies_before_it_has_marked_repeats_a_message(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit(api, n=5)
    relay_outbox._work(waking.take())
    monkeypatch.setattr(relay_outbox, "_unmarked", relay_outbox.Unmarked())  # as in the next process
    assert relay_outbox._work([[]]) == 1 and messages(world) == 2


@one_database
@pytest.mark.parametrize("error, state", [(BrokerAway("refused"), "waiting"), (TypeError("no JSON"), "waiting")])
def test_what_the_broker_does_not_take_waits_as_ever(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str,
) -> None:
    def refuse(*rows: Row) -> None:
        raise error

    publish = publishing.publish
    job_id = submit(api, n=5)
    monkeypatch.setattr(publishing, "publish", refuse)
    assert relay_outbox._work(waking.take()) == 0
    assert states(world) == {job_id: state} and relay() == []  # not before a while
    assert world.sql("SELECT failures FROM outbox") == [(int(isinstance(error, TypeError)),)]
    monkeypatch.setattr(publishing, "publish", publish)
    assert relay(later(6)) == [("run_job", job_id)]


@one_database
def test_a_cancelled_job_is_no_trouble(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    assert api.post(f"/jobs/{job_id}/cancel").status_code == 200
    relay_outbox._work(waking.take())
    relay_outbox._mark_all()
    assert run_job.run_once(job_id) is None and states(world) == {}


@one_database
@pytest.mark.parametrize("token", ["1", "{}", "nonsense", "[[1, 2]]", '[["run_job", "x", "q", null, "never", null]]'])
def test_a_token_that_cannot_be_read_says_that_something_is_due(
    api: FlaskClient, world: World, token: str,
) -> None:
    """It may be one of another version."""
    job_id = submit(api, n=5)
    world.redis.delete(waking.KEY)
    world.redis.rpush(waking.KEY, token)
    assert relay_outbox._work(waking.wait(1)) == 1 and states(world) == {job_id: "leased"}


@one_database
def test_tokens_that_nobody_takes_are_bounded(api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "_MOST", 3)
    made = [submit(api, n=5) for _ in range(5)]
    assert [row.target_id for rows in waking.take() for row in rows] == made[2:]
    assert relay_outbox._work([[]]) == 5


def test_relays_of_a_process_publish_each_row_once(api: FlaskClient, world: World) -> None:
    """Whether they find it by its token or by a claim."""
    over = threading.Event()
    kind = kinds.registry()["primes"]

    def by_claims() -> None:
        while not over.is_set():
            relay_outbox._work([[]])

    def by_tokens() -> None:
        while not over.is_set():
            if tokens := waking.take():
                relay_outbox._work(tokens)

    threads = [threading.Thread(target=each) for each in (by_claims, by_tokens)]
    for thread in threads:
        thread.start()
    made = [submit(api, kind.name, n=5) for _ in range(60)]
    over.set()
    for thread in threads:
        thread.join()
    relay_outbox._work([[]])
    assert messages(world) == len(made)
