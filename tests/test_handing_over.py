"""What a submission hands to the relay with its wake token: published at once, without a claim, and nothing hangs on
it."""
from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from flask.testing import FlaskClient
from kombu.exceptions import OperationalError as BrokerAway
from sqlalchemy import select, text

from app import clock, db, kinds, outbox, redis_client, submissions, waking
from app.outbox import Row
from tasks import publishing, relay_outbox, run_job
from tests.conftest import World, one_database
from tests.running import Crash, a_kind, later, relay, submit
from tests.servers import wait_until


UNTIL, TARGET = "2026-11-30T12:00:00.000000+00:00", ["x", "q", 1, None]
NEVER = later(0)
TOKEN = ["run_job", UNTIL, [TARGET]]


def messages(world: World) -> int:
    return world.redis.llen("q:jobs2")


def states(world: World) -> dict[str, str]:
    return dict(world.sql("SELECT target_id, state FROM outbox"))


_leased_until = waking.leased_until


@pytest.fixture(autouse=True)
def as_in_real_processes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "leased_until", _leased_until)


def work(tokens: list[list[Row]], unmarked: relay_outbox.Unmarked | None = None) -> int:
    return relay_outbox._work(tokens, unmarked or relay_outbox.Unmarked())


def mark(unmarked: relay_outbox.Unmarked) -> None:
    relay_outbox._mark(unmarked, clock.now())


def test_a_token_says_what_the_outbox_says(api: FlaskClient, world: World) -> None:
    for body in ({"n": 5}, {"n": 5, "callback_url": "http://127.0.0.1:9/"}):
        world.set(CALLBACK_ALLOW="127.0.0.1:9")
        assert api.post("/jobs", json=body).status_code == 202
    assert api.post("/notes", json={"text": "é", "callback_url": "http://127.0.0.1:9/"}).status_code == 202
    assert api.post("/notes", json={"text": "é"}).status_code == 202
    handed = [row for rows in waking.take() for row in rows]
    with db.reading() as view:
        kept = [Row(*row) for row in view.execute(select(*outbox._columns).order_by(outbox.outbox.c.id))]
    assert len(handed) == 4
    assert [replace(row, available_at=NEVER) for row in handed] == [
        replace(row, id=0, available_at=NEVER) for row in kept]


def test_what_is_handed_over_is_published_once_by_whoever_takes_its_token(api: FlaskClient, world: World) -> None:
    job_id, unmarked = submit(api, n=5), relay_outbox.Unmarked()
    tokens = waking.take()
    assert work([[]]) == 0  # another relay's tick
    assert work(tokens, unmarked) == 1
    assert messages(world) == 1 and states(world) == {job_id: "leased"}
    assert work([[]]) == 0
    mark(unmarked)
    assert states(world) == {job_id: "published"} and work([[]]) == 0 and messages(world) == 1


@one_database
def test_a_tick_takes_what_was_handed_over_before(api: FlaskClient, world: World) -> None:
    world.set(RELAY_INTERVAL_SECONDS="0.1")
    made = [submit(api, n=5) for _ in range(3)]
    relay_outbox.relay_outbox()
    assert messages(world) == 3 and states(world) == dict.fromkeys(made, "published")


@one_database
def test_what_is_handed_over_is_marked_while_more_comes(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other relay takes it for lost."""
    made: list[str] = []

    def wait(seconds: float) -> list[list[Row]]:
        if len(made) == 6:
            raise Crash
        assert world.count("outbox", "state = 'leased'") <= 1
        made.append(submit(api, n=5))
        return waking.take()

    monkeypatch.setattr(relay_outbox, "_MARK_SECONDS", 0.0)
    monkeypatch.setattr(waking, "wait", wait)
    with pytest.raises(Crash):
        relay_outbox.relay_outbox()
    assert messages(world) == 6


def test_what_is_claimed_before_it_is_marked_needs_no_mark(api: FlaskClient, world: World) -> None:
    job_id, unmarked = submit(api, n=5), relay_outbox.Unmarked()
    work(waking.take(), unmarked)
    before = clock.now()
    after = run_job.run_once(job_id)
    assert after is not None and after.published_at is not None and after.published_at < before
    mark(unmarked)
    assert states(world) == {}


def test_what_was_staged_anew_meanwhile_is_not_marked(api: FlaskClient, world: World) -> None:
    """The message of the next attempt is not the one that was published."""
    def fail(input: Any, job: Any) -> None:
        raise ValueError

    with a_kind(fail, max_attempts=2) as kind:
        job_id, unmarked = submit(api, kind), relay_outbox.Unmarked()
        work(waking.take(), unmarked)
        assert run_job.run_once(job_id) is not None
        mark(unmarked)
        assert states(world) == {job_id: "waiting"}
        assert relay(later(600)) == [("run_job", job_id)]


def test_a_token_that_got_lost_delays_until_its_lease_is_over(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    world.redis.delete(waking.KEY)
    assert relay() == [] and relay(later(waking.HANDED_SECONDS)) == [("run_job", job_id)]


@one_database
def test_a_token_that_comes_too_late_is_left_to_a_claim(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = submit(api, n=5)
    moment = later(waking.HANDED_SECONDS)
    monkeypatch.setattr(clock, "now", lambda: moment)
    assert work(waking.take()) == 0 and messages(world) == 0
    assert relay(moment) == [("run_job", job_id)]


@one_database
def test_without_redis_a_submission_waits_for_the_next_tick_only(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_client, "_away_until", float("inf"))
    job_id = submit(api, n=5)
    assert states(world) == {job_id: "waiting"} and relay() == [("run_job", job_id)]


@one_database
def test_a_relay_that_dies_before_it_has_marked_repeats_a_message(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    work(waking.take())
    assert relay() == [] and relay(later(waking.HANDED_SECONDS)) == [("run_job", job_id)]


@one_database
@pytest.mark.parametrize("error", [BrokerAway("refused"), TypeError("no JSON")])
def test_what_the_broker_does_not_take_is_claimed_when_its_lease_is_over(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, error: Exception,
) -> None:
    def refuse(*rows: Row) -> None:
        raise error

    job_id = submit(api, n=5)
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "publish", refuse)
        assert work(waking.take()) == 0
    assert states(world) == {job_id: "leased"} and relay() == []
    assert relay(later(waking.HANDED_SECONDS)) == [("run_job", job_id)]


@one_database
def test_who_waited_long_for_the_writer_is_handed_over_all_the_same(api: FlaskClient, world: World) -> None:
    waited = submissions._Submission("ada", kinds.registry()["primes"], {"n": 5}, None, None, later(-9))
    submissions._group.commit(waited)
    assert work(waking.take()) == 1


@one_database
def test_a_cancelled_job_is_no_trouble(api: FlaskClient, world: World) -> None:
    job_id, unmarked = submit(api, n=5), relay_outbox.Unmarked()
    assert api.post(f"/jobs/{job_id}/cancel").status_code == 200
    work(waking.take(), unmarked)
    mark(unmarked)
    assert run_job.run_once(job_id) is None and states(world) == {}


@one_database
@pytest.mark.parametrize("token", ["1", "{}", "nonsense", "[[1, 2]]", "[]", *map(json.dumps, (
    ["rm", UNTIL, [TARGET]], ["run_job", "never", [TARGET]], ["run_job", UNTIL[:19], [TARGET]],
    ["run_job", "0001-01-01T00:00:00+09:00", [TARGET]], ["run_job", UNTIL, [[5, "q", 1, None]]],
    ["run_job", UNTIL, [["x\0", "q", 1, None]]], ["run_job", UNTIL, [["x", ["q"], 1, None]]],
    ["run_job", UNTIL, [["x", "q", "long", None]]], ["run_job", UNTIL, [["x", "q", 1, {}]]]))])
def test_a_token_that_cannot_be_read_says_that_something_is_due(world: World, token: str) -> None:
    """It may be one of another version."""
    world.redis.rpush(waking.KEY, token)
    assert waking.wait(1) == [[]]
    world.redis.rpush(waking.KEY, token, json.dumps(TOKEN))
    assert [len(rows) for rows in waking.take()] == [0, 1]


@one_database
def test_tokens_that_nobody_takes_are_bounded(api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "_MOST", 3)
    monkeypatch.setattr(waking, "_TRIM_EVERY", 1)
    made = [submit(api, n=5) for _ in range(5)]
    assert [row.target_id for rows in waking.take() for row in rows] == made[2:]
    assert len(relay(later(waking.HANDED_SECONDS))) == 5


@one_database
def test_what_nobody_publishes_is_seen(api: FlaskClient, world: World) -> None:
    submit(api, n=5)
    with db.reading() as view:
        since = outbox.oldest_unpublished(view)
    assert since is not None and later(0) < since <= later(waking.HANDED_SECONDS)  # when others may claim it


def test_relays_publish_each_row_once(api: FlaskClient, world: World) -> None:
    """Whether they find it by its token or by a claim."""
    over = threading.Event()

    def relaying(tick: bool) -> None:
        unmarked = relay_outbox.Unmarked()
        while not over.is_set():
            if tokens := [[]] if tick else waking.take():
                work(tokens, unmarked)
            mark(unmarked)

    threads = [threading.Thread(target=relaying, args=(tick,)) for tick in (True, False, True, False)]
    for thread in threads:
        thread.start()
    made = [submit(api, n=5) for _ in range(60)]
    wait_until(lambda: world.count("outbox", "state = 'published'") == len(made), what="all are published")
    over.set()
    for thread in threads:
        thread.join()
    assert messages(world) == len(made)


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_a_claim_that_stands_still_holds_up_no_relay(api: FlaskClient, world: World) -> None:
    """Its worker's machine may be gone in the middle of it."""
    first, second, unmarked = submit(api, n=5), submit(api, n=6), relay_outbox.Unmarked()
    assert work(waking.take(), unmarked) == 2
    with db.engine().connect() as other:
        other.execute(text("DELETE FROM outbox WHERE target_id = :id"), {"id": first})
        mark(unmarked)
    assert states(world) == {first: "leased", second: "published"}
    assert relay(later(waking.HANDED_SECONDS)) == [("run_job", first)]
