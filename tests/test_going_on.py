"""Whoever ends an attempt goes on with the next of the same endpoint: nothing is lost, sent twice, or taken from
others."""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, db, deliveries, joining, outbox, redis_client, turns
from tasks import deliver_webhook, going_on, rescue_stalled
from tasks.egress import Answer
from tests import crashing
from tests.asking import all_at_once
from tests.conftest import World, one_database
from tests.crashing import Flow
from tests.receiver import Receiver
from tests.running import Crash, finish, kind, later, relay
from tests.servers import wait_until
from tests.test_isolation import OTHER, SICK, allowed, answers, attempt, fail_for_long, note, told, under_way
from tests.test_lock_order import meanwhile

__all__ = ["allowed"]  # a fixture
WELL = SICK


@pytest.fixture(autouse=True)
def long_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(going_on, "SECONDS", 600.0)
    monkeypatch.setattr(going_on, "BATCH_SECONDS", 60.0)
    yield


def some(api: FlaskClient, url: str, number: int) -> list[str]:
    """So many deliveries that are due, to an endpoint that is well; they have no messages."""
    note(url, True)
    ids = [finish(api, url) for _ in range(number)]
    with db.transaction() as tx:
        for delivery_id in ids:
            outbox.settle(tx, "deliver_webhook", delivery_id)
    return ids


def state_of(world: World) -> dict[str, tuple[str, int]]:
    return {row[0]: (row[1], row[2]) for row in world.sql("SELECT id, state, attempts FROM deliveries")}


def test_one_message_leads_to_all_of_an_endpoint(api: FlaskClient, world: World) -> None:
    note(WELL, True)
    ids = [finish(api, WELL) for _ in range(6)]  # each has a row in the outbox
    made = deliver_webhook.run(ids[0], post=answers(204))
    assert [(delivery.id, delivery.state, delivery.attempts) for delivery in made] == [
        (delivery_id, "delivered", 1) for delivery_id in ids]
    assert world.count("outbox") == 0 and world.count("delivery_attempts", "response_code = 204") == 6
    for (job_id,) in world.sql("SELECT id FROM jobs"):
        shown = api.get(f"/jobs/{job_id}").json["callback"]
        assert shown == {"status": "delivered", "attempts": 1, "last_response": 204}


def test_when_a_slice_is_over_whoever_is_in_turn_gets_the_place(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice counts as one attempt: who has nothing under way comes first, and nothing stays claimed."""
    world.set(CALLBACK_PER_HOST="2")
    monkeypatch.setattr(going_on, "SECONDS", 0.0)
    busy = some(api, WELL, 4)
    (fine,) = some(api, OTHER, 1)
    with under_way(busy[0]):
        assert [delivery.id for delivery in deliver_webhook.run(busy[1], post=answers(204))] == [busy[1]]
        assert world.count("deliveries", "state = 'sending'") == 1
        assert told(world) == [fine]
        deliver_webhook.run(fine, post=answers(204))
        assert told(world) == [busy[2]]


def test_a_slice_ends_in_time(api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a courier that is asked to stop has nothing claimed soon."""
    monkeypatch.setattr(going_on, "SECONDS", 0.1)
    ids = some(api, WELL, 8)
    made = deliver_webhook.run(ids[0], post=answers(204, then=lambda: threading.Event().wait(0.06)))
    assert 1 <= len(made) <= 2 and world.count("deliveries", "state = 'sending'") == 0
    assert told(world) and set(state_of(world).values()) == {("delivered", 1), ("pending", 0)}


@pytest.mark.parametrize("code", [500, 404])
@one_database
def test_only_who_succeeds_goes_on(api: FlaskClient, world: World, code: int) -> None:
    ids = some(api, WELL, 3)
    assert [delivery.id for delivery in deliver_webhook.run(ids[0], post=answers(code))] == [ids[0]]
    assert told(world) == ids[1:2 if code == 500 else 3]


def test_a_retry_that_has_a_message_waits_for_it(api: FlaskClient, world: World) -> None:
    """It may have to step back: what failed together does not return together."""
    failed = finish(api, WELL)
    attempt(failed, 500)
    first, second = some(api, WELL, 2)
    made = deliver_webhook.run(first, post=answers(204), now=lambda: later(60))
    assert [delivery.id for delivery in made] == [first, second]
    assert state_of(world)[failed] == ("pending", 1)


def test_no_more_is_under_way_than_allowed(api: FlaskClient, world: World) -> None:
    """Nor fewer: nobody ends before as many are under way."""
    ids, under, most, lock, full = some(api, WELL, 60), Counter[str](), list[int](), threading.Lock(), threading.Event()

    def post(*_: Any) -> Answer:
        with lock:
            under["now"] += 1
            most.append(under["now"])
        if under["now"] == 4:
            full.set()
        assert full.wait(10)
        with lock:
            under["now"] -= 1
        return Answer(204, None, b"")

    all_at_once([lambda each=each: deliver_webhook.run(each, post=post) for each in ids[::6]])
    while due := relay():
        for _, target in due:
            deliver_webhook.run(target, post=post)
    assert max(most) == 4 and len(most) == 60
    assert set(state_of(world).values()) == {("delivered", 1)} and world.count("delivery_attempts") == 60


def test_who_begins_a_slice_calls_one_more_if_there_is_room(api: FlaskClient, world: World) -> None:
    ids = some(api, WELL, going_on.MOST + 2)
    calls = iter([None, lambda: seen.append(told(world))])
    seen: list[list[str]] = []

    def post(*_: Any) -> Answer:
        if call := next(calls, None):
            call()
        return Answer(204, None, b"")

    deliver_webhook.run(ids[0], post=post)
    assert seen == [[ids[-1]]]


def test_a_sender_that_was_frozen_takes_nobodys_place(api: FlaskClient, world: World) -> None:
    ids = some(api, WELL, 2)

    def freeze(*_: Any) -> Answer:
        rescue_stalled.run_once(later(31), {})
        return Answer(204, None, b"")

    assert deliver_webhook.run(ids[0], post=freeze) == []
    assert state_of(world) == {ids[0]: ("pending", 1), ids[1]: ("pending", 0)}


def test_who_could_not_be_shown_is_not_sent_and_uses_no_attempt(api: FlaskClient, world: World) -> None:
    ids = some(api, WELL, 2)

    def lose_redis() -> None:
        redis_client._away_until = float("inf")

    made = deliver_webhook.run(ids[0], post=answers(204, then=lose_redis))
    redis_client._away_until = 0.0
    assert [delivery.id for delivery in made] == [ids[0]]
    assert state_of(world)[ids[1]] == ("pending", 0) and world.count("delivery_attempts") == 1
    assert told(world) == [] and told(world, later(3)) == [ids[1]]


# --- whoever dies ---


@pytest.mark.parametrize("seam, tries, came", [
    ("before commit 2", [2, 1, 1], [2, 1, 1]),  # sent, and it cannot be known; the next are not reserved either
    ("after commit 2", [1, 1, 1], [1, 1, 1]),  # the next are reserved, and not sent
    ("before POST 3", [1, 1, 1], [1, 2, 1]),  # one of them was sent, and it is not written down
    ("after POST 3", [1, 1, 1], [1, 2, 2]),
    ("before commit 3", [1, 1, 1], [1, 2, 2]),
    ("after commit 3", [1, 1, 1], [1, 1, 1]),
])
def test_wherever_a_process_dies_only_what_was_not_written_down_is_repeated(
    api: FlaskClient, world: World, receiver: Receiver, seam: str, tries: list[int], came: list[int],
) -> None:
    ids = some(api, receiver.url, 3)
    assert crashing.die("go on", seam, Flow("", {}, kind("primes")), ids[0]) == -9
    wait_until(lambda: world.dialect == "sqlite" or world.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND xact_start IS NOT NULL") == [(0,)])
    rescue_stalled.run_once(later(31), {})
    for seconds in (31, 39):
        while due := relay(later(seconds)):
            for _, target in due:
                deliver_webhook.run(target, now=lambda: later(seconds))
    assert [state_of(world)[delivery_id] for delivery_id in ids] == [("delivered", number) for number in tries]
    hooks = Counter(hook.headers["webhook-id"] for hook in receiver.hooks)
    assert [hooks[delivery_id] for delivery_id in ids] == came and world.count("outbox") == 0


def test_who_dies_in_mid_attempt_leaves_those_behind_alone(api: FlaskClient, world: World) -> None:
    ids, calls = some(api, WELL, 4), iter([False, True])

    def post(*_: Any) -> Answer:
        if next(calls):
            raise Crash
        return Answer(204, None, b"")

    with pytest.raises(Crash):
        deliver_webhook.run(ids[0], post=post)
    assert [state_of(world)[each] for each in ids] == [("delivered", 1), ("sending", 0), *[("pending", 0)] * 2]
    assert told(world) == [ids[2]]


# --- who joins a queue needs no message ---


def test_of_many_that_are_due_as_many_have_messages_as_there_is_room_for(api: FlaskClient, world: World) -> None:
    sick, fine = [finish(api, SICK) for _ in range(8)], finish(api, OTHER)
    assert told(world) == [*sick[:2], fine] and world.count("outbox", "task = 'deliver_webhook'") == 3
    with under_way(*sick[:2]):
        assert attempt(fine).state == "delivered"
    made = deliver_webhook.run(sick[2], post=answers(204), now=lambda: later(31))
    assert [delivery.id for delivery in made] == sick[2:]


def test_who_may_have_to_wait_longer_keeps_its_message(api: FlaskClient, world: World) -> None:
    """A retry steps back when it is late; a paused endpoint is put off as one."""
    world.set(CALLBACK_PER_HOST="2")
    retries = [finish(api, OTHER) for _ in range(5)]
    for retry in retries:
        attempt(retry, 500)
    fail_for_long()
    paused = [finish(api, SICK) for _ in range(5)]
    assert set(told(world, later(10))) == {*retries, *paused}


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_who_withdraws_messages_waits_for_whoever_ends_an_attempt(api: FlaskClient, world: World) -> None:
    """That one may not see those that wait, so it must not be counted on."""
    ids = [finish(api, SICK) for _ in range(6)]
    with db.transaction() as tx:
        rows = outbox.claim(tx, "a lease", clock.now(), later(15), 100)
    with db.transaction() as tx:
        turns.hold(tx, deliveries.host_of(SICK))
        with meanwhile(world, lambda: joining.withdraw(rows, "a lease", 4, clock.now())) as outcome:
            for delivery_id in ids:
                outbox.settle(tx, "deliver_webhook", delivery_id)
            tx.commit()
    assert [row.target_id for row in outcome[0] if row.task == "deliver_webhook"] == ids[:2]
