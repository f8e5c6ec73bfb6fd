"""What a sick endpoint may take up, and when it is left alone: in simulated time, with the real claims."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import backoff, circuits, clock, db, deliveries, doctor, states
from tasks import deliver_webhook, prune_expired, rescue_stalled, threads
from tasks.egress import Answer, Unanswered
from tests import statements
from tests.asking import redeliver
from tests.conftest import World, one_database
from tests.running import finish, later, relay

HOST = "http://127.0.0.1:9"
SICK, OTHER = f"{HOST}/sick", f"{HOST}/other"
HOUR = 3600.0


@pytest.fixture(autouse=True)
def allowed(world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9", CALLBACK_SCHEDULE_SECONDS="0,5,300,1800")


def answers(code: int, then: Callable[[], Any] = lambda: None) -> Any:
    def post(*_: Any) -> Answer:
        then()
        return Answer(code, None, b"")

    return post


def hangs(*_: Any) -> Answer:
    raise Unanswered("no whole answer within 15 s")


def attempt(
    delivery_id: str, code: int = 204, at: datetime | None = None, then: Callable[[], Any] = lambda: None,
) -> Any:
    return deliver_webhook.run_once(delivery_id, post=answers(code, then), now=lambda: at or clock.now())


def told(world: World, now: datetime | None = None) -> list[str]:
    """The deliveries that the relay publishes now."""
    return [target for task, target in relay(now) if task == "deliver_webhook"]


def standing(world: World, url: str) -> circuits.Circuit | None:
    with db.reading() as view:
        return circuits.find(view, circuits.endpoint_of(url))


def note(url: str, answered: bool, seconds: float = 0.1, at: datetime | None = None) -> circuits.Circuit:
    with db.transaction() as tx:
        return circuits.note(
            tx, circuits.endpoint_of(url), deliveries.host_of(url), answered, seconds, 0.5, at or clock.now())


@contextlib.contextmanager
def under_way(*ids: str) -> Iterator[None]:
    """While attempts of these hang."""
    def begin(delivery_id: str) -> bool:
        with db.reading() as view:
            known = deliveries.find(view, delivery_id)
            assert known is not None
            circuit = circuits.find(view, known.endpoint)
        with db.transaction() as tx:
            standing = None if circuit is None else circuit.standing
            return deliveries.claim(tx, known, clock.now(), later(30), 4, standing) is not None

    assert all([begin(delivery_id) for delivery_id in ids])
    yield


# --- a host's attempts ---


@pytest.mark.parametrize("before, most", [(None, 2), (states.WELL, 4), (states.SLOW, 2), (states.FAILING, 1)])
def test_how_much_of_its_host_an_endpoint_may_take_up(
    api: FlaskClient, world: World, before: str | None, most: int,
) -> None:
    if before is not None:
        note(SICK, before != states.FAILING, 3.0 if before == states.SLOW else 0.1)
    ids = [finish(api, f"{SICK}?{number}") for number in range(most + 1)]
    with under_way(*ids[:most]):
        assert attempt(ids[most]) is None
        assert world.count("outbox", "task = 'deliver_webhook'") == 0  # it waits without a message


def test_a_host_takes_no_more_for_all_its_endpoints(api: FlaskClient, world: World) -> None:
    for number in range(5):
        note(f"{HOST}/{number}", True)
    ids = [finish(api, f"{HOST}/{number}") for number in range(5)]
    with under_way(*ids[:4]):
        assert attempt(ids[4]) is None


@pytest.mark.parametrize("per_host, most", [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_an_endpoint_has_always_room_for_one(per_host: int, most: int) -> None:
    assert circuits.attempts_at_a_time(None, per_host) == circuits.attempts_at_a_time(states.SLOW, per_host) == most
    assert circuits.attempts_at_a_time(states.FAILING, per_host) == 1
    assert circuits.attempts_at_a_time(states.WELL, per_host) == per_host


def test_beside_one_that_hangs_another_of_the_same_host_goes_on(api: FlaskClient, world: World) -> None:
    sick = [finish(api, SICK) for _ in range(10)]
    fine = [finish(api, OTHER) for _ in range(10)]
    with under_way(*sick[:2]):
        assert [attempt(waiting) for waiting in sick[2:]] == [None] * 8
        assert [attempt(delivery_id).state for delivery_id in fine] == ["delivered"] * 10


def test_who_has_nothing_under_way_comes_before_who_waited_longer(api: FlaskClient, world: World) -> None:
    for url in (SICK, OTHER):
        note(url, True)
    sick = [finish(api, SICK) for _ in range(6)]
    fine = [finish(api, OTHER) for _ in range(2)]
    relay()
    with under_way(*sick[1:4]):
        def meanwhile() -> None:
            for waiting in [*sick[4:], *fine]:
                assert attempt(waiting) is None

        attempt(sick[0], then=meanwhile)
        assert told(world) == [fine[0]]
        attempt(fine[0])
        assert told(world) == [fine[1]]
        attempt(fine[1])
        assert told(world) == [sick[4]]


def test_when_the_only_attempt_has_ended_well_as_many_go_on_as_may(api: FlaskClient, world: World) -> None:
    note(SICK, False)
    ids = [finish(api, SICK) for _ in range(7)]
    relay()
    attempt(ids[0], then=lambda: [attempt(waiting) for waiting in ids[1:]])
    assert told(world) == ids[1:5]


@one_database
def test_who_comes_when_others_wait_costs_no_message(api: FlaskClient, world: World) -> None:
    ids = [finish(api, SICK) for _ in range(4)]
    with under_way(*ids[:2]):
        assert [attempt(waiting) for waiting in ids[2:]] == [None, None]
        relay()
        late = [finish(api, SICK), finish(api, SICK)]
        fine = finish(api, OTHER)
        assert told(world) == [fine]
        attempt(fine)
    world.sql("UPDATE deliveries SET state = 'pending', next_attempt_at = created_at, leased_until = NULL "
              "WHERE state = 'sending'")
    done = [target for target in ids[:2] if attempt(target)]
    while due := told(world):
        done += [target for target in due if attempt(target)]
    assert sorted(done) == sorted([*ids, *late])


def test_when_it_has_failed_one_goes_on(api: FlaskClient, world: World) -> None:
    note(SICK, False)
    ids = [finish(api, SICK) for _ in range(5)]
    world.sql("DELETE FROM outbox")  # they all wait
    attempt(ids[0], 500)
    assert told(world) == [ids[1]]


def test_however_many_endpoints_of_a_host_hang_one_place_is_for_those_that_are_well(
    api: FlaskClient, world: World,
) -> None:
    note(OTHER, True)
    sick = [finish(api, f"{SICK}/{number}") for number in range(6)]
    fine = [finish(api, OTHER) for _ in range(3)]
    relay()
    with under_way(*sick[:3]):
        assert [attempt(waiting) for waiting in sick[3:]] == [None] * 3
        assert [attempt(delivery_id).state for delivery_id in fine] == ["delivered"] * 3


def test_who_is_well_comes_before_who_is_not(api: FlaskClient, world: World) -> None:
    note(OTHER, True)
    sick = [finish(api, f"{SICK}/{number}") for number in range(6)]
    fine = [finish(api, OTHER) for _ in range(2)]
    world.sql("DELETE FROM outbox")  # they all wait
    with under_way(*sick[:2]):
        attempt(sick[2], 500)
        assert told(world) == [fine[0]]
        with under_way(fine[0]):
            attempt(sick[3], 500)
            assert told(world) == [sick[4]]  # not well, but nothing of it is under way


# --- the standing of an endpoint ---


def test_an_endpoint_is_a_url_without_its_query() -> None:
    one = circuits.endpoint_of(f"{SICK}?job=1")
    assert one == circuits.endpoint_of(SICK) == circuits.endpoint_of(f"{SICK}?job=2")
    assert len({one, circuits.endpoint_of(OTHER), circuits.endpoint_of(SICK.replace("http", "https"))}) == 3


@pytest.mark.parametrize("code, becomes", [
    *((code, "well") for code in (204, 404, 410)), *((code, "failing") for code in (302, 408, 429, 500))])
@one_database
def test_what_each_answer_says_of_its_endpoint(api: FlaskClient, world: World, code: int, becomes: str) -> None:
    attempt(finish(api, SICK), code)
    found = standing(world, SICK)
    assert found is not None and (found.standing, found.failures) == (becomes, int(becomes == "failing"))


def test_an_endpoint_that_does_not_answer_fails_until_it_does(api: FlaskClient, world: World) -> None:
    delivery_id = finish(api, SICK)
    deliver_webhook.run_once(delivery_id, post=hangs)
    first = standing(world, SICK)
    assert first is not None and (first.standing, first.failures) == ("failing", 1)
    deliver_webhook.run_once(delivery_id, post=hangs, now=lambda: later(10))
    second = standing(world, SICK)
    assert second is not None and (second.failures, second.failing_since) == (2, first.failing_since)
    attempt(delivery_id, at=later(400))
    third = standing(world, SICK)
    assert third is not None and (third.standing, third.failures, third.failing_since) == ("well", 0, None)


def test_what_never_reached_an_endpoint_says_nothing_of_it(api: FlaskClient, world: World) -> None:
    interrupted, refused = finish(api, SICK), finish(api, SICK)
    with under_way(interrupted):
        rescue_stalled.run_once(later(31), {})
    assert world.sql("SELECT attempts, state FROM deliveries ORDER BY id") == [(1, "pending"), (0, "pending")]
    world.set(CALLBACK_ALLOW="")
    assert deliver_webhook.run_once(refused).state == "refused"
    assert standing(world, SICK) is None


# --- an endpoint that has failed for long ---


def fail_for_long(url: str = SICK, hours: float = 1.0) -> circuits.Circuit:
    """So many hours of failures until now."""
    begin = later(-hours * HOUR)
    for number in range(circuits.FAILURES_IN_A_ROW):
        circuit = note(url, False, at=begin + timedelta(hours=hours) * number / (circuits.FAILURES_IN_A_ROW - 1))
    return circuit


@pytest.mark.parametrize("failures, seconds, pauses", [(10, 600, True), (9, 6000, False), (1000, 599, False)])
def test_when_an_endpoint_is_paused(world: World, failures: int, seconds: float, pauses: bool) -> None:
    begin = clock.now()
    for number in range(min(failures, 12)):
        circuit = note(SICK, False, at=begin + timedelta(seconds=seconds) * number / (min(failures, 12) - 1))
    assert (circuit.paused_until is not None) is pauses and circuit == standing(world, SICK)
    assert circuit.failing_since == begin


@pytest.mark.parametrize("failing_seconds, chance, pause", [
    (600, 0.5, 60), (600, 0, 48), (600, 1, 72), (HOUR, 0.5, 360), (100 * HOUR, 0.5, HOUR)])
def test_a_pause_is_a_tenth_of_the_failing_and_an_hour_at_most(
    failing_seconds: float, chance: float, pause: float,
) -> None:
    assert backoff.pause_seconds(failing_seconds, chance) == pytest.approx(pause)


def test_a_paused_endpoint_is_not_called_and_costs_its_callbacks_nothing(api: FlaskClient, world: World) -> None:
    until = fail_for_long().paused_until
    assert until is not None and 280 < (until - clock.now()).total_seconds() < 440
    ids = [finish(api, SICK) for _ in range(20)]
    assert set(told(world)) == set(ids)
    for delivery_id in ids:
        assert attempt(delivery_id, then=lambda: pytest.fail("called")) is None
    assert world.sql("SELECT DISTINCT state, attempts FROM deliveries") == [("pending", 0)]
    assert told(world, until - timedelta(seconds=1)) == []
    assert told(world, until) == [ids[0]]  # one message for all of them


def test_after_a_pause_one_attempt_is_made_and_a_longer_pause_follows(api: FlaskClient, world: World) -> None:
    until = fail_for_long().paused_until
    assert until is not None
    ids = [finish(api, SICK) for _ in range(5)]
    relay()
    for delivery_id in ids:
        attempt(delivery_id)
    during = [attempt(ids[0], 500, until, then=lambda: [attempt(waiting, at=until) for waiting in ids[1:]])]
    assert [delivery.attempts for delivery in during] == [1]
    again = standing(world, SICK)
    assert again is not None and again.paused_until is not None and again.failures == circuits.FAILURES_IN_A_ROW + 1
    assert told(world, again.paused_until - timedelta(seconds=1)) in ([], [ids[0]])  # its own next one, to be put off
    assert ids[1] in told(world, again.paused_until)


def test_an_answer_ends_the_pause_and_all_that_wait_go_on(
    api: FlaskClient, world: World, caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    until = fail_for_long().paused_until
    assert until is not None
    ids = [finish(api, SICK) for _ in range(12)]
    relay()
    for delivery_id in ids:
        attempt(delivery_id)
    done: list[str] = []
    while due := told(world, until):
        done += [target for target in due if attempt(target, at=until).state == "delivered"]
    assert sorted(done) == ids
    found = standing(world, SICK)
    assert found is not None and (found.standing, found.paused_until) == ("well", None)
    lines = [record.message for record in caplog.records if record.name == "uketsuke.circuits"]
    assert lines == ["endpoint paused: it has failed for long", "endpoint answers again"]
    assert all(SICK not in str(record.__dict__) for record in caplog.records)


def test_a_pause_leaves_other_endpoints_of_the_host_alone(api: FlaskClient, world: World) -> None:
    fail_for_long()
    sick, fine = finish(api, SICK), finish(api, OTHER)
    assert attempt(sick) is None
    assert attempt(fine).state == "delivered"


def test_who_asks_for_another_round_ends_the_pause(api: FlaskClient, world: World) -> None:
    until = fail_for_long().paused_until
    delivery_id = finish(api, SICK)
    attempt(delivery_id)
    assert told(world) == []
    (job_id,) = world.sql("SELECT job_id FROM deliveries")[0]
    assert redeliver(api, job_id).status_code == 202
    assert told(world) == [delivery_id] and attempt(delivery_id, 500).attempts == 1
    found = standing(world, SICK)
    assert found is not None and until is not None and found.paused_until is not None


def test_a_pause_is_shown(api: FlaskClient, world: World) -> None:
    delivery_id = finish(api, SICK)
    (job_id,) = world.sql("SELECT job_id FROM deliveries")[0]
    assert api.get(f"/jobs/{job_id}/deliveries").json == {"deliveries": []}
    attempt(delivery_id, 500)
    assert api.get(f"/jobs/{job_id}/deliveries").json["endpoint"]["standing"] == "failing"
    assert 'uketsuke_failing_endpoints{state="tried"} 1.0' in api.get("/metrics").text
    note(SICK, True)
    until = fail_for_long(hours=30).paused_until
    assert until is not None
    shown = api.get(f"/jobs/{job_id}/deliveries").json["endpoint"]
    assert shown["failures"] == 10 and shown["paused_until"] == clock.isoformat(until) and shown["failing_since"]
    note(SICK, True)
    assert api.get(f"/jobs/{job_id}/deliveries").json["endpoint"] == {"standing": "well", "failures": 0}


def test_who_waited_for_the_whole_schedule_is_given_up(api: FlaskClient, world: World) -> None:
    fail_for_long()
    old, new = finish(api, SICK), finish(api, SICK)
    attempt(old)
    attempt(new)
    whole = 2105 * 1.2
    world.sql("UPDATE deliveries SET created_at = :then WHERE id = :old", then=text_of(later(-whole - 10)), old=old)
    world.sql("UPDATE deliveries SET created_at = :then WHERE id = :new", then=text_of(later(-whole + 60)), new=new)
    assert rescue_stalled.run_once(clock.now(), {}) == 1
    assert world.sql("SELECT state, attempts FROM deliveries ORDER BY id") == [("exhausted", 1), ("pending", 0)]
    (job_id,) = world.sql("SELECT job_id FROM deliveries WHERE state = 'exhausted'")[0]
    (row,) = api.get(f"/jobs/{job_id}/deliveries").json["deliveries"]
    assert (row["error"], row["attempt"]) == ("not attempted: the endpoint has failed for too long", 1)
    callback = api.get(f"/jobs/{job_id}").json["callback"]
    assert callback == {"status": "exhausted", "attempts": 1}
    assert told(world, later(HOUR)) == [new]


def text_of(moment: datetime) -> Any:
    """As a person writes it in either database's shell."""
    return moment.isoformat(sep=" ") if db.engine().dialect.name == "postgresql" else moment.replace(
        tzinfo=None).isoformat(sep=" ")


def test_a_message_that_was_lost_in_a_pause_is_found(api: FlaskClient, world: World) -> None:
    until = fail_for_long().paused_until
    assert until is not None
    ids = [finish(api, SICK) for _ in range(3)]
    world.sql("DELETE FROM outbox")
    assert rescue_stalled.run_once(later(60), {}) == 0  # it is paused
    rescue_stalled.run_once(until + timedelta(seconds=11), {})
    assert told(world, until + timedelta(seconds=11)) == [ids[0]]


def test_the_doctor_finds_nothing_wrong_in_a_pause(api: FlaskClient, world: World) -> None:
    fail_for_long()
    for _ in range(3):
        attempt(finish(api, SICK))
    world.sql("UPDATE deliveries SET next_attempt_at = :then", then=text_of(later(-200)))
    broken = [finding for finding in doctor._broken() if "delivery" in finding.promise]
    assert broken == []


def test_an_endpoint_is_forgotten_when_it_has_not_changed_for_a_day(api: FlaskClient, world: World) -> None:
    note(SICK, True, at=later(-86_500))
    note(SICK, True, at=later(-86_400))  # no change
    note(OTHER, True, at=later(-86_500))
    note(OTHER, False, at=later(-86_300))
    prune_expired.run_once(clock.now())
    assert standing(world, SICK) is None and standing(world, OTHER) is not None


def test_while_we_were_away_nobody_is_given_up(api: FlaskClient, world: World) -> None:
    """The pause is over, and nobody has asked the endpoint since."""
    until = fail_for_long().paused_until
    assert until is not None
    ids = [finish(api, SICK) for _ in range(5)]
    for delivery_id in ids:
        attempt(delivery_id)
    days_later = later(9 * 86_400)
    rescue_stalled.run_once(days_later, {})
    assert world.sql("SELECT DISTINCT state FROM deliveries") == [("pending",)]
    while due := told(world, days_later + timedelta(seconds=60)):
        for target in due:
            attempt(target, at=days_later + timedelta(seconds=60))
    assert world.sql("SELECT DISTINCT state FROM deliveries") == [("delivered",)]


# --- the courier's threads ---


@one_database
def test_threads_are_kept_for_endpoints_that_answer(world: World) -> None:
    world.set(COURIER_CONCURRENCY=23)  # 20 for callbacks

    def granted(standing: str | None, most: int = 50) -> int:
        number = 0
        while number < most and stack.enter_context(threads.one(standing)):
            number += 1
        return number

    with contextlib.ExitStack() as stack:
        assert granted(states.FAILING) == 5
        assert granted(None) == 5
        assert granted(states.SLOW) == 0
        assert granted(states.WELL) == 10
    with contextlib.ExitStack() as stack:
        assert granted(states.WELL) == 20
    with contextlib.ExitStack() as stack:
        assert granted(states.SLOW) == 10


@one_database
@pytest.mark.parametrize("before, goes", [(states.WELL, True), (states.FAILING, False), (None, False)])
def test_an_endpoint_that_is_new_counts_as_its_hosts_last_one(
    api: FlaskClient, world: World, before: str | None, goes: bool,
) -> None:
    """Where each callback has a path of its own."""
    world.set(COURIER_CONCURRENCY=16)
    if before is not None:
        note(f"{HOST}/one", before == states.WELL)
    delivery_id = finish(api, f"{HOST}/another")
    with contextlib.ExitStack() as others:
        while others.enter_context(threads.one(None)):
            pass
        assert (attempt(delivery_id) is not None) is goes


@one_database
def test_who_finds_no_thread_waits_with_one_message_an_endpoint(api: FlaskClient, world: World) -> None:
    world.set(COURIER_CONCURRENCY=16)
    sick, fine = [finish(api, SICK) for _ in range(5)], finish(api, OTHER)
    relay()
    with contextlib.ExitStack() as others:
        while others.enter_context(threads.one(None)):
            pass
        assert [attempt(waiting) for waiting in [*sick, fine]] == [None] * 6
        assert sorted(told(world, later(2))) == sorted([sick[0], fine])
    attempt(sick[0], at=later(2))
    assert sick[1] in told(world, later(2))


# --- the cost ---


def test_a_turn_is_found_by_an_index(api: FlaskClient, world: World) -> None:
    """Of every statement that an attempt runs."""
    fail_for_long(OTHER)
    delivery_id, waiting = finish(api, SICK), finish(api, SICK)
    relay()
    note(SICK, True)

    with statements.made_here() as made, under_way(finish(api, SICK)):
        attempt(delivery_id, then=lambda: world.sql("DELETE FROM outbox WHERE target_id = :id", id=waiting))
    about = [(text, values) for text, values in made if "deliveries" in text or "endpoints" in text]
    assert len(about) > 8
    with db.transaction() as tx:
        if world.dialect == "postgresql":
            tx.exec_driver_sql("SET LOCAL enable_seqscan = off")
        prefix = "EXPLAIN QUERY PLAN" if world.dialect == "sqlite" else "EXPLAIN"
        for statement, values in about:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")):
                plan = "\n".join(str(row) for row in tx.exec_driver_sql(f"{prefix} {statement}", values))
                assert "SCAN" not in plan and "Seq Scan" not in plan, (statement, plan)
