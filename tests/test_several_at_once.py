"""A thread that goes on makes several callbacks before it records them: what is only reserved uses no attempt, takes up
no place, and waits for nobody for long."""
from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, db, deliveries, doctor, slices, states, turns
from app.deliveries import Attempt
from app.errors import EndpointRefused
from tasks import deliver_webhook, going_on, rescue_stalled, threads
from tasks.egress import Answer
from tests import statements
from tests.conftest import World, one_database
from tests.running import Crash, finish, later, relay
from tests.servers import wait_until
from tests.test_going_on import WELL, long_slices, some, state_of
from tests.test_isolation import OTHER, allowed, answers, attempt, hangs, note, standing, told, under_way

__all__ = ["allowed", "long_slices"]  # fixtures

UNSENT, DELIVERED = ("pending", 0), ("delivered", 1)


def one_after_the_other(*calls: Callable[..., Any]) -> Callable[..., Answer]:
    """Answers the first attempts so, and all others well."""
    each = iter(calls)
    return lambda *asked: next(each, answers(204))(*asked)


def places(world: World) -> int:
    with db.transaction() as tx:
        turns.hold(tx, deliveries.host_of(WELL))
        return turns.room(tx, deliveries.host_of(WELL), 4, clock.now()).sending.total()


def test_a_batch_is_one_transaction_and_one_place(api: FlaskClient, world: World) -> None:
    ids, seen = some(api, WELL, 1 + going_on.MOST), list[Any]()

    def look(*_: Any) -> Answer:
        seen.append((places(world), [state_of(world)[each] for each in ids[1:]]))
        assert not [finding for finding in doctor._broken() if "deliver" in finding.promise]
        return Answer(204, None, b"")

    with statements.made_here() as made:
        deliver_webhook.run(ids[0], post=one_after_the_other(answers(204), look))
    assert seen == [(1, [("sending", 0)] * going_on.MOST)]
    assert set(state_of(world).values()) == {DELIVERED} and world.count("delivery_attempts") == len(ids)
    texts = [text for text, _ in itertools.groupby(text for text, _ in made)]  # several rows in a row are one step
    assert len([1 for text in texts if text.startswith("INSERT INTO delivery_attempts")]) == 2
    assert len([1 for text in texts if text.startswith("UPDATE jobs")]) == 2


@one_database
@pytest.mark.parametrize("seconds, until, most", [
    (0.0001, 60, going_on.MOST), (0.01, 60, 5), (0.06, 60, 1), (9, 60, 1), (0.01, 0.06, 5), (0.01, 0.04, 0)])
def test_how_many_a_batch_has(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, until: float, most: int,
) -> None:
    monkeypatch.setattr(going_on, "BATCH_SECONDS", 0.05)
    monkeypatch.setattr(going_on.time, "monotonic", lambda: 100.0)
    tried = Attempt("msg_1", 1, clock.now(), 204, None, seconds, None)
    made: Any = [slices.Made(None, tried)]  # type: ignore[arg-type]
    assert going_on._how_many(made, 100.0 + until) == most


def test_batches_that_wait_for_each_other_are_one_transaction(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes on in a place of its own with what has been due longest."""
    ids, recorded, goes_on, directly = some(api, WELL, 9), list[list[str]](), threading.Event(), slices.record
    monkeypatch.setattr(going_on, "BATCH_SECONDS", 1.5)  # one of a second
    later_on = time.monotonic() + 600

    def record(tx: Any, endpoint: str, host: str, made: Any, now: Any) -> Any:
        recorded.append([each.tried.delivery_id for each in made])
        if len(recorded) == 1:
            assert goes_on.wait(30)
        return directly(tx, endpoint, host, made, now)

    with db.transaction() as tx:
        reserved = slices.reserve(
            tx, standing(world, WELL).id, deliveries.host_of(WELL), [2, 2, 2], clock.now(), later(30))
    assert places(world) == 3
    batches = [going_on.Batch(deque(), 0.0, made=[
        slices.Made(one, Attempt(one.delivery.id, 1, clock.now(), 204, None, 1.0, None)) for one in place])
        for place in reserved]
    monkeypatch.setattr(slices, "record", record)
    done = dict[int, going_on.Recorded]()
    for number, batch in enumerate(batches):
        threading.Thread(target=lambda number=number, batch=batch: done.update({  # type: ignore[misc]
            number: going_on.record(batch, later_on, True, clock.now(), timedelta(seconds=30))})).start()
        group = going_on._ends_of(standing(world, WELL).id) if number else None
        wait_until(lambda: len(group._gathering._waiting) == number if group else len(recorded) == 1,
                   what="it records, or waits")
    goes_on.set()
    wait_until(lambda: len(done) == 3, what="all are recorded")
    assert recorded == [ids[:2], ids[2:6]]
    assert [[each.id for each in done[number].ended] for number in range(3)] == [ids[:2], ids[2:4], ids[4:6]]
    assert [[one.delivery.id for one in done[number].following] for number in range(3)] == [
        [ids[6]], [ids[7]], [ids[8]]]
    assert places(world) == 3 and world.count("delivery_attempts") == 6


def test_who_has_just_been_staged_is_left_to_its_message(api: FlaskClient, world: World) -> None:
    """Which opens another place. It is taken when there is nobody else, or when the message does not come."""
    ids = some(api, WELL, 4)
    place = standing(world, WELL).id, deliveries.host_of(WELL)

    def reserved(most: int, seconds: float) -> list[str]:
        with db.transaction() as tx:
            (found,) = slices.reserve(tx, *place, [most], later(seconds), later(seconds + 30))
            assert turns.room(tx, place[1], 4, later(seconds)).sending.total() == 1
            slices.give_back(tx, found)
            turns.stage(tx, ids[0], later(0), later(0))
        return [one.delivery.id for one in found]

    with db.transaction() as tx:
        turns.stage(tx, ids[0], later(0), later(0))
    assert reserved(3, 0.1) == ids[1:]
    assert reserved(4, 0.1) == [*ids[1:], ids[0]]
    assert reserved(2, 60) == ids[:2]


def test_places_of_the_same_moment_are_counted_apart(api: FlaskClient, world: World) -> None:
    note(WELL, True)
    ids, now, until = [finish(api, WELL) for _ in range(5)], later(1), later(30)
    for delivery_id in ids:
        with db.transaction() as tx:
            known = deliveries.find(tx, delivery_id)
            assert known is not None
            deliveries.claim(tx, known, now, until, 4, states.WELL)
    assert places(world) == 4 and [state_of(world)[each] for each in ids] == [("sending", 1)] * 4 + [UNSENT]


# --- whoever else waits ---


def test_beside_a_batch_others_have_the_room_that_they_have_beside_one_attempt(
    api: FlaskClient, world: World,
) -> None:
    """Of its host, and of others."""
    world.set(CALLBACK_ALLOW="127.0.0.1:9,127.0.0.1:10")
    busy, fine, elsewhere = some(api, WELL, 12), some(api, OTHER, 4), finish(api, "http://127.0.0.1:10/")

    def meanwhile(*_: Any) -> Answer:
        assert attempt(elsewhere).state == "delivered"
        with under_way(*fine[:3]):
            assert attempt(fine[3]) is None
        return Answer(204, None, b"")

    deliver_webhook.run(busy[0], post=one_after_the_other(answers(204), meanwhile))
    assert [state_of(world)[each] for each in busy] == [DELIVERED] * 12


def test_behind_one_slow_answer_nothing_waits_for_long(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was answered is recorded, and what is behind goes another way."""
    monkeypatch.setattr(going_on, "BATCH_SECONDS", 0.1)
    ids = some(api, WELL, 6)

    def slow(*_: Any) -> Answer:
        wait_until(lambda: state_of(world)[ids[5]] == UNSENT, what="those behind are given back")
        assert [state_of(world)[each] for each in ids] == [DELIVERED] * 2 + [("sending", 0)] + [UNSENT] * 3
        assert told(world) == [ids[3]]
        deliver_webhook.run(ids[3], post=answers(204))
        return Answer(204, None, b"")

    deliver_webhook.run(ids[0], post=one_after_the_other(answers(204), answers(204), slow))
    assert [state_of(world)[each] for each in ids] == [DELIVERED] * 6
    assert world.count("delivery_attempts") == 6 and world.count("outbox") == 0


# --- who is not answered well ---


def refuses(*_: Any) -> Answer:
    raise EndpointRefused("not there")


@pytest.mark.parametrize("bad, becomes", [
    (answers(500), "pending"), (hangs, "pending"), (answers(404), "exhausted"), (answers(410), "gone"),
    (refuses, "refused")])
@one_database
def test_a_failure_in_the_middle_ends_the_batch(
    api: FlaskClient, world: World, bad: Callable[..., Answer], becomes: str,
) -> None:
    ids = some(api, WELL, 5)
    made = deliver_webhook.run(ids[0], post=one_after_the_other(answers(204), answers(204), bad))
    assert [(delivery.id, delivery.state) for delivery in made] == [
        (ids[0], "delivered"), (ids[1], "delivered"), (ids[2], becomes)]
    assert [state_of(world)[each] for each in ids] == [DELIVERED] * 2 + [(becomes, 1)] + [UNSENT] * 2
    assert world.count("delivery_attempts") == 3 and world.count("deliveries", "state = 'sending'") == 0
    well = becomes in ("exhausted", "gone", "refused")
    found = standing(world, WELL)
    assert found is not None and (found.standing == "well") is well
    assert told(world) == (ids[3:] if well else ids[3:4])  # nothing is under way, so as many as may
    assert told(world, later(10)) == ([ids[2]] if becomes == "pending" else [])


def test_a_retry_in_a_batch_counts_on(api: FlaskClient, world: World) -> None:
    retry = finish(api, WELL)
    attempt(retry, 500)
    world.sql("DELETE FROM outbox")
    first, _ = some(api, WELL, 2)
    post = one_after_the_other(answers(204), answers(204), answers(500))
    deliver_webhook.run(first, post=post, now=lambda: later(60))
    rows = world.sql(
        "SELECT attempt, response_code FROM delivery_attempts WHERE delivery_id = :id ORDER BY 1", id=retry)
    assert state_of(world)[retry] == ("pending", 2) and rows == [(1, 500), (2, 500)]


# --- whoever breaks, freezes or dies ---


def test_what_broke_a_batch_comes_back_alone(api: FlaskClient, world: World) -> None:
    ids = some(api, WELL, 5)

    def broken(*_: Any) -> Answer:
        raise LookupError

    with pytest.raises(LookupError):
        deliver_webhook.run(ids[0], post=one_after_the_other(answers(204), answers(204), broken))
    assert [state_of(world)[each] for each in ids] == [DELIVERED] * 2 + [("sending", 0)] + [UNSENT] * 2
    assert told(world) == [ids[3]]
    rescue_stalled.run_once(later(31), {})
    assert told(world, later(31)) == [ids[2]] and state_of(world)[ids[2]] == UNSENT
    made = deliver_webhook.run(ids[3], post=answers(204))
    assert [delivery.id for delivery in made] == ids[3:]  # the other one is not taken along
    assert [delivery.attempts for delivery in deliver_webhook.run(ids[2], post=answers(204))] == [1]


def test_what_kills_its_sender_ends(api: FlaskClient, world: World) -> None:
    """It takes the others down with it, and is counted every other time at least."""
    world.set(CALLBACK_SCHEDULE_SECONDS="0,0,0")
    ids, deaths = some(api, WELL, 8), list[str]()

    def post(url: str, body: bytes, headers: dict[str, str], _: float) -> Answer:
        if headers["webhook-id"] == ids[4]:
            raise Crash
        return Answer(204, None, b"")

    due = [("deliver_webhook", ids[0])]
    for hour in range(20):
        for _, target in due:
            with contextlib.suppress(Crash):
                deliver_webhook.run(target, post=post, now=lambda: later(hour * 3600))
                continue
            deaths.append(target)
        rescue_stalled.run_once(later(hour * 3600 + 31), {})
        due = relay(later(hour * 3600 + 60))
    assert state_of(world) == {**dict.fromkeys(ids, DELIVERED), ids[4]: ("exhausted", 3)}
    assert len(deaths) <= 6


def test_a_sender_that_was_frozen_records_nothing_that_others_have(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(going_on, "BATCH_SECONDS", 0.1)
    ids, sent = some(api, WELL, 5), list[str]()

    def freeze(*_: Any) -> Answer:
        rescue_stalled.run_once(later(31), {})
        assert told(world, later(31)) == ids[1:]
        assert attempt(ids[1], 500, at=later(32)).attempts == 1
        assert attempt(ids[2], 204, at=later(32)).attempts == 1
        with db.transaction() as tx:
            known = deliveries.find(tx, ids[3])
            assert known is not None
            assert deliveries.claim(tx, known, later(33), later(63), 4, states.WELL) is not None
        threading.Event().wait(2 * going_on.BATCH_SECONDS + 0.05)  # which it was, too
        return Answer(204, None, b"")

    def late(url: str, body: bytes, headers: dict[str, str], _: float) -> Answer:
        sent.append(headers["webhook-id"])
        return Answer(204, None, b"")

    made = deliver_webhook.run(ids[0], post=one_after_the_other(answers(204), freeze, late))
    assert [delivery.id for delivery in made] == ids[:1] and sent == []
    assert [state_of(world)[each] for each in ids] == [
        DELIVERED, ("pending", 1), DELIVERED, ("sending", 1), UNSENT]
    assert world.count("delivery_attempts") == 3


@one_database
def test_the_fence_is_the_lease_too(api: FlaskClient, world: World) -> None:
    """A delivery that was reserved, given back and reserved by another has the same state and number of attempts."""
    first, second = some(api, WELL, 2)
    place = standing(world, WELL).id, deliveries.host_of(WELL)

    def reserve(seconds: float) -> slices.Claimed:
        with db.transaction() as tx:
            ((one,),) = slices.reserve(tx, *place, [1], clock.now(), later(seconds))
            return one

    lost = reserve(30)
    with db.transaction() as tx:
        slices.give_back(tx, [lost])
    ours = reserve(40)
    assert ours.delivery.id == lost.delivery.id and ours.delivery.attempts == lost.delivery.attempts == 0
    tried = Attempt(lost.delivery.id, 1, clock.now(), 204, None, 0.1, None)
    with db.transaction() as tx:
        assert slices.record(tx, *place, [slices.Made(lost, tried)], clock.now())[1] == [None]
        assert deliveries.record(tx, lost.delivery, tried, "exhausted", None, clock.now()) is None
        assert slices.set_apart(tx, lost.delivery, clock.now()) is False
        slices.give_back(tx, [lost])
    assert state_of(world)[lost.delivery.id] == ("sending", 0) and world.count("delivery_attempts") == 0
    with db.transaction() as tx:
        (_, after), lost_again = slices.record(
            tx, *place, [slices.Made(ours, tried), slices.Made(lost, tried)], clock.now())[1]
        assert after.state == "delivered" and lost_again is None


# --- one slice after the other ---


@pytest.mark.parametrize("needed, made", [("by nobody", 2), ("to stop", 1), ("for another", 1), ("by threads", 1)])
@one_database
def test_a_slice_follows_the_other_while_nobody_needs_its_place(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch, needed: str, made: int,
) -> None:
    ids = some(api, WELL, 5)
    if needed == "to stop":
        monkeypatch.setattr(going_on._stopping, "is_set", lambda: True)
    elif needed == "for another":
        some(api, OTHER, 1)
    elif needed == "by threads":
        monkeypatch.setitem(threads._taken, "all", 40)
    with under_way(*ids[1:4]):
        assert len(deliver_webhook._run(ids[0], answers(204), clock.now, time.monotonic())) == made
