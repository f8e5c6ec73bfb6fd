"""What failed together does not return together: jitter, and retries that an outage of ours made late."""
from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import backoff, clock, db, deliveries, jobs
from app.deliveries import Delivery
from tasks import deliver_webhook, relay_outbox
from tasks.egress import Answer, Unanswered
from tests import receiver as receivers
from tests.conftest import World
from tests.receiver import Receiver
from tests.running import later, relay
from tests.servers import free_port
from tests.test_schedule import attempt_at, finish


def many(api: FlaskClient, url: str, count: int) -> list[str]:
    """So many deliveries that are due now; of one job, for a job each would take the time of the test."""
    first = finish(api, url)
    with db.transaction() as tx:
        job = jobs.find(tx, first.job_id)
        assert job is not None
        return [first.id, *(deliveries.add(tx, job, first.created_at, first.created_at).id for _ in range(count - 1))]


def histogram(moments: list[datetime], since: datetime) -> Counter[int]:
    """How many fall into each second after that moment."""
    return Counter(int((moment - since).total_seconds()) for moment in moments)


def picture(seconds: Counter[int]) -> str:
    """The histogram as a person reads it."""
    return "".join(f"\n{second:4} s {seconds[second]:4} {'#' * seconds[second]}" for second in sorted(seconds))


def no_answer(*_: Any) -> Answer:
    raise Unanswered("not there")


def accept(*_: Any) -> Answer:
    return Answer(204, None, b"")


def due_at(delivery: Delivery) -> datetime:
    assert delivery.next_attempt_at is not None
    return delivery.next_attempt_at


def test_what_failed_together_is_due_and_arrives_apart(api: FlaskClient, world: World) -> None:
    """500 callbacks to a closed port; then neither relay nor courier for five minutes, and a receiver that is there."""
    count = 500 if world.dialect == "sqlite" else 200
    port = free_port()
    world.set(CALLBACK_SCHEDULE_SECONDS="0,10,600", CALLBACK_ALLOW=f"127.0.0.1:{port}", CALLBACK_PER_HOST="1000")
    ids = many(api, f"http://127.0.0.1:{port}/", count)
    failed = later(1)
    assert len(relay(failed)) == count
    waiting = [due_at(deliver_webhook.run_once(delivery_id, now=lambda: failed)) for delivery_id in ids]
    due = histogram(waiting, failed)
    assert set(due) == {8, 9, 10, 11} and sum(due.values()) == count, picture(due)
    assert all(0.1 * count < each < 0.4 * count for each in due.values()), picture(due)

    back = failed + timedelta(seconds=300)
    assert len(relay(back)) == count  # all at one moment
    assert {deliver_webhook.run_once(delivery_id, post=accept, now=lambda: back) for delivery_id in ids} == {None}
    assert world.sql("SELECT DISTINCT state, attempts FROM deliveries") == [("pending", 1)]
    arrived: list[datetime] = []
    for second in range(1, 62):
        moment = back + timedelta(seconds=second)
        for _, delivery_id in relay(moment):
            after = deliver_webhook.run_once(delivery_id, post=accept, now=lambda: moment)
            assert after is not None, "a retry steps back once"
            arrived.append(moment)
    seconds = histogram(arrived, back)
    assert len(arrived) == count and max(seconds.values()) < 0.1 * count and len(seconds) > 50, picture(seconds)
    assert world.sql("SELECT DISTINCT state, attempts FROM deliveries") == [("delivered", 2)]


@pytest.mark.parametrize("late,chance,expected", [
    (0, 0.5, 0), (-5, 0.5, 0), (10, 1.0, 0), (10.1, 1.0, 10.1), (20, 0.5, 10), (60, 0.25, 15), (3600, 0.0, 0),
    (3600, 0.5, 30), (3600, 1.0, 60), (10**9, 1.0, 60),
])
def test_how_far_a_late_retry_steps_back(late: float, chance: float, expected: float) -> None:
    assert backoff.spread_seconds(late, chance) == expected


def waiting_retry(api: FlaskClient, url: str) -> Delivery:
    delivery = finish(api, url)
    assert relay() == [("deliver_webhook", delivery.id)]
    return attempt_at(delivery, clock.now(), post=no_answer)


def test_a_late_retry_steps_back_once_however_late_it_is_again(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    delivery = waiting_retry(api, receiver.url)
    back = due_at(delivery) + timedelta(seconds=30)
    assert relay(back) == [("deliver_webhook", delivery.id)]
    assert deliver_webhook.run_once(delivery.id, now=lambda: back) is None and receiver.hooks == []
    ((state, attempts),) = world.sql("SELECT state, attempts FROM deliveries")
    assert (state, attempts) == ("pending", 1) and world.count("delivery_attempts") == 1
    assert relay(back) == []
    again = back + timedelta(hours=1)
    assert relay(again) == [("deliver_webhook", delivery.id)]
    assert attempt_at(delivery, again).state == "delivered"


def test_a_retry_whose_message_is_not_marked_yet_is_as_late(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    """A relay publishes a hundred, then marks them; the courier has the first long before."""
    delivery = waiting_retry(api, receiver.url)
    back = due_at(delivery) + timedelta(seconds=30)
    met: list[Delivery | None] = []

    def publish(row: Any) -> None:
        met.append(deliver_webhook.run_once(row.target_id, now=lambda: back))

    relay_outbox.drain(publish, now=lambda: back)
    assert met == [None] and receiver.hooks == []
    assert relay(back + timedelta(seconds=61)) == [("deliver_webhook", delivery.id)]


def test_a_retry_that_is_a_little_late_goes_at_once(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery = waiting_retry(api, receiver.url)
    moment = due_at(delivery) + timedelta(seconds=9.9)
    relay(moment)
    assert attempt_at(delivery, moment + timedelta(seconds=100)).state == "delivered"  # the courier took its time


def test_a_first_attempt_is_never_held_back(api: FlaskClient, world: World, receiver: Receiver) -> None:
    delivery = finish(api, receiver.url)
    assert relay(later(3600)) == [("deliver_webhook", delivery.id)]
    assert attempt_at(delivery, later(3600)).state == "delivered"


def test_a_retry_that_waited_for_a_busy_host_is_not_late(api: FlaskClient, world: World, receiver: Receiver) -> None:
    world.set(CALLBACK_PER_HOST="1")
    first, second = waiting_retry(api, receiver.url), waiting_retry(api, receiver.url)
    moment = max(due_at(first), due_at(second))
    assert len(relay(moment)) == 2
    ended = moment + timedelta(seconds=14)

    def post(*_: Any) -> Answer:
        assert deliver_webhook.run_once(second.id, now=lambda: moment) is None
        return accept()

    moments = iter([moment, moment])
    assert deliver_webhook.run_once(first.id, post=post, now=lambda: next(moments, ended)).state == "delivered"
    assert relay(ended) == [("deliver_webhook", second.id)]
    assert attempt_at(second, ended).state == "delivered"


def test_a_retry_that_was_asked_for_meanwhile_is_made_at_once(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    delivery = waiting_retry(api, receiver.url)
    assert api.post(f"/jobs/{delivery.job_id}/redeliver").status_code == 202
    assert relay() == [("deliver_webhook", delivery.id)]
    assert attempt_at(delivery, clock.now()).state == "delivered"


def test_two_messages_of_a_late_retry_lead_to_one_attempt(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    receiver.respond = receivers.status(204)
    delivery = waiting_retry(api, receiver.url)
    back = due_at(delivery) + timedelta(seconds=300)
    relay(back)
    outcomes = [deliver_webhook.run_once(delivery.id, now=lambda: back) for _ in range(3)]
    assert outcomes[0] is None and len(receiver.hooks) <= 1
    relay(back + timedelta(seconds=61))
    deliver_webhook.run_once(delivery.id, now=lambda: back + timedelta(seconds=61))
    assert len(receiver.hooks) == 1
