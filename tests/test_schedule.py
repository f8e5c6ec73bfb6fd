"""When a callback is tried again: the whole table, the answers that stop it, and what a receiver's Retry-After may do.
The clock is passed in."""
from __future__ import annotations

import json
import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import backoff, clock, config, db, deliveries
from app.deliveries import Attempt, Delivery
from tasks import deliver_webhook, prune_expired, publishing, relay_outbox, rescue_stalled, run_job
from tasks.egress import Answer
from tests import receiver as receivers
from tests.conftest import World, one_database
from tests.receiver import Receiver
from tests.running import Crash, later, relay, submit

NOW = datetime(2026, 11, 29, tzinfo=timezone.utc)
CONTRACT = (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
DAY = 86_400


def finish(api: FlaskClient, url: str) -> Delivery:
    """Runs a job with this callback; returns the delivery that waits for its first attempt."""
    job_id = submit(api, n=5, callback_url=url)
    run_job.run_once(job_id)
    return latest(job_id)


def latest(job_id: str) -> Delivery:
    with db.reading() as view:
        found = deliveries.latest_of_job(view, job_id)
    assert found is not None
    return found


def attempt_at(delivery: Delivery, moment: datetime, **more: Any) -> Delivery:
    after = deliver_webhook.run_once(delivery.id, now=lambda: moment, **more)
    assert after is not None
    return after


# --- the table ---


def test_the_default_schedule_is_the_contracts() -> None:
    assert config.Settings(_env_file=None).callback_schedule_seconds == CONTRACT


def test_a_delivery_walks_the_whole_default_schedule(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """Ten attempts over three days: each when it is due, none before, whatever message comes too early; the job is kept
    until then although its own time is over, and the delivery can be asked for again."""
    world.set(CALLBACK_SCHEDULE_SECONDS="")
    receiver.respond = receivers.status(503)
    delivery = finish(api, receiver.url)
    failed = delivery.created_at
    for attempt, wait in enumerate(CONTRACT, 1):
        assert (delivery.state, delivery.attempts) == ("pending", attempt - 1)
        due = delivery.next_attempt_at
        assert due is not None and 0.8 * wait <= (due - failed).total_seconds() <= 1.2 * wait
        if attempt > 1:
            assert deliver_webhook.run_once(delivery.id, now=lambda: due - timedelta(seconds=2)) is None
            assert relay(due - timedelta(microseconds=1)) == []
        assert prune_expired.run_once(due) == 0
        assert relay(due) == [("deliver_webhook", delivery.id)]
        delivery, failed = attempt_at(delivery, due), due
        assert len(receiver.hooks) == attempt
    assert (delivery.state, delivery.attempts, delivery.next_attempt_at) == ("exhausted", 10, None)
    assert delivery.finished_at == failed > later(3 * DAY * 0.8)
    assert world.count("outbox") == 0 and rescue_stalled.run_once(failed + timedelta(days=30), {}) == 0
    rows = api.get(f"/jobs/{delivery.job_id}/deliveries").json["deliveries"]
    assert [(row["attempt"], row["response_code"]) for row in rows] == [(number, 503) for number in range(1, 11)]
    assert {hook.headers["webhook-id"] for hook in receiver.hooks} == {delivery.id}
    receiver.respond = None
    assert api.post(f"/jobs/{delivery.job_id}/redeliver").status_code == 202
    again = latest(delivery.job_id)
    assert again.id != delivery.id and attempt_at(again, clock.now()).state == "delivered"


@pytest.mark.parametrize("attempt,chance,retry_after,expected", [
    (1, 0.5, None, 5), (1, 0.0, None, 4), (1, 1.0, None, 6), (2, 0.5, None, 300), (1, 0.5, 60.0, 66),
    (1, 0.0, 60.0, 60), (1, 1.0, 60.0, 72), (1, 1.0, 86_400.0, 86_400),
    (2, 0.5, 60.0, 300), (3, 0.5, None, None), (3, 0.5, 60.0, None),
])
def test_when_the_next_try_is_due(attempt: int, chance: float, retry_after: float | None, expected: Any) -> None:
    due = backoff.next_delivery_at((0, 5, 300), attempt, chance, retry_after, NOW)
    assert due == (None if expected is None else NOW + timedelta(seconds=expected))


def test_nothing_of_a_wait_is_in_the_broker(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """A retry that waits is columns; its message is made when it is due, and says whose turn it is and nothing else."""
    receiver.respond = receivers.status(503)
    delivery = attempt_at(finish(api, receiver.url), clock.now())
    world.redis.flushall()
    due = delivery.next_attempt_at
    assert due is not None and relay_outbox.drain(publishing.publish, now=lambda: due - timedelta(seconds=1)) == 0
    assert not [name for name in world.redis.scan_iter() if not name.startswith(("job:", "outbox:"))]
    assert relay_outbox.drain(publishing.publish, now=lambda: due) == 1
    (raw,) = world.redis.lrange("callbacks", 0, -1)
    headers = json.loads(raw)["headers"]
    assert headers["task"] == "tasks.deliver_webhook" and headers["argsrepr"] == f"[{delivery.id!r}]"
    assert headers["eta"] is headers["expires"] is None and headers["retries"] == 0
    assert "countdown" not in raw and due.isoformat()[:16] not in raw
    assert attempt_at(delivery, due).attempts == 2


# --- which answers stop it ---

STOP = {400, 401, 403, 404, 405, 413, 415, 422}


@one_database
def test_each_status_stops_the_delivery_or_is_tried_again(world: World) -> None:
    def ends_as(code: int | None, attempts: int, refused: bool = False) -> str:
        held = Delivery("msg_1", "job", "http://x/", "x:80", "e", "sending", attempts, None, NOW, None, NOW, None)
        tried = Attempt("msg_1", attempts, NOW, code, None, 0.1, None)
        ending = deliver_webhook.decide(held, tried, None, refused, 0.5, NOW)
        assert (ending.next_attempt_at is not None) is (ending.becomes == "pending")
        return ending.becomes

    for code in (None, *range(200, 1000)):  # None: no answer at all
        expected = "gone" if code == 410 else "exhausted" if code in STOP else "pending"
        if code is not None and code < 300:
            expected = "delivered"
        assert ends_as(code, attempts=1) == expected, code
        assert ends_as(code, attempts=3) == expected.replace("pending", "exhausted"), code
        assert ends_as(code, attempts=1, refused=True) == "refused"


@pytest.mark.parametrize("code,state", [
    (200, "delivered"), (204, "delivered"), (299, "delivered"), (400, "exhausted"), (404, "exhausted"), (410, "gone"),
    (422, "exhausted"), (301, "pending"), (302, "pending"), (303, "pending"), (307, "pending"), (308, "pending"),
    (304, "pending"), (402, "pending"), (408, "pending"), (425, "pending"), (429, "pending"), (500, "pending"),
    (503, "pending"), (599, "pending"), (999, "pending"),
])
@one_database
def test_what_each_answer_leads_to(
    api: FlaskClient, world: World, receiver: Receiver, code: int, state: str,
) -> None:
    receiver.respond = receivers.status(code, Location=receiver.url + "/elsewhere")
    after = attempt_at(finish(api, receiver.url + "/hook"), clock.now())
    assert (after.state, after.last_response) == (state, code)
    assert [hook.path for hook in receiver.hooks] == ["/hook"]  # never followed
    assert (after.next_attempt_at is None) is (state != "pending")
    assert (world.count("outbox", "task = 'deliver_webhook'") == 1) is (state == "pending")


def test_an_interrupted_attempt_is_one_of_the_schedule(api: FlaskClient, world: World, receiver: Receiver) -> None:
    world.set(CALLBACK_SCHEDULE_SECONDS="0,5")
    delivery = finish(api, receiver.url)

    def die(*_: Any) -> Answer:
        raise Crash

    moment = clock.now()
    for attempt, state in ((1, "pending"), (2, "exhausted")):
        with pytest.raises(Crash):
            attempt_at(delivery, moment, post=die)
        moment += timedelta(seconds=31)
        assert rescue_stalled.run_once(moment, {}) == 1
        delivery = latest(delivery.job_id)
        assert (delivery.state, delivery.attempts) == (state, attempt)
        if delivery.next_attempt_at is not None:
            assert 4 <= (delivery.next_attempt_at - moment).total_seconds() <= 6
            moment = delivery.next_attempt_at
    assert world.sql("SELECT count(*) FROM delivery_attempts WHERE error LIKE 'interrupted%'") == [(2,)]


@one_database
def test_a_receiver_that_is_slower_than_our_patience_is_told_once_an_attempt(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    """It has taken each of them, and knows by their one id that they are the same."""
    world.set(CALLBACK_TIMEOUT_SECONDS=1, CALLBACK_SCHEDULE_SECONDS="0,1,1",
              CALLBACK_ALLOW=f"127.0.0.1:{receiver.port}")
    over = threading.Event()

    def respond(handler: Any, count: int) -> None:
        over.wait(20)
        receivers.status(200)(handler, count)

    receiver.respond = respond
    delivery, moment = finish(api, receiver.url), clock.now()
    while delivery.next_attempt_at is not None:
        moment = max(moment, delivery.next_attempt_at)
        delivery = attempt_at(delivery, moment)
    over.set()
    assert (delivery.state, delivery.attempts, delivery.last_response) == ("exhausted", 3, None)
    assert [hook.headers["webhook-id"] for hook in receiver.hooks] == [delivery.id] * 3
    assert len({hook.body for hook in receiver.hooks}) == 1
    assert world.sql("SELECT DISTINCT error FROM delivery_attempts") == [("no whole answer within 1 s",)]
    assert api.get(f"/jobs/{delivery.job_id}").json["status"] == "succeeded"


# --- Retry-After ---

FORMATS = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y")  # RFC 9110 5.6.7


def ahead(seconds: float, form: str) -> str:
    return later(seconds).strftime(form)


@pytest.mark.parametrize("header,expected", [
    ("15", 15), ("0", 0), ("007", 7), (" 15 ", 15), ("86400", DAY), ("86401", DAY), ("1000000000", DAY),
    (str(10**40), DAY), ("9" * 400, DAY),
    *(("Mon, 29 Nov 2099 00:00:00 GMT", DAY), ("Fri, 31 Dec 9999 23:59:59 GMT", DAY)),
    *(("Sun, 06 Nov 1994 08:49:37 GMT", 0), ("Sunday, 06-Nov-94 08:49:37 GMT", 0), ("Sun Nov  6 08:49:37 1994", 0)),
    *((header, None) for header in (
        None, "", " ", "-5", "-0", "+5", "1.5", "1e9", "0x10", "1_000", "inf", "nan", "15, 30", "15,", "15 s", "soon",
        "é", "१५", "１５", "²", "15\x00", ",,,", "GMT", "2026-12-01T00:00:00Z", "Wed, 32 Foo 2026 99:99:99 GMT",
        "Mon, 29 Nov 99999999999 00:00:00 GMT", "9" * 60_000)),
], ids=lambda value: repr(value)[:40])
def test_retry_after_is_seconds_or_a_date(header: str | None, expected: Any) -> None:
    assert backoff.retry_after_seconds(header) == expected


@pytest.mark.parametrize("form", FORMATS)
def test_retry_after_takes_each_form_of_a_date(form: str) -> None:
    found = backoff.retry_after_seconds(ahead(7200, form))
    assert found is not None and 7100 < found <= 7200


@pytest.mark.parametrize("retry_after", [0.0, 1.0, 239.0])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_retry_after_never_shortens_a_wait(retry_after: float, chance: float) -> None:
    assert backoff.next_delivery_at(CONTRACT, 2, chance, retry_after, NOW) == backoff.next_delivery_at(
        CONTRACT, 2, chance, None, NOW)


@one_database
@pytest.mark.parametrize("code", [429, 503])
def test_the_receivers_retry_after_is_honoured(
    api: FlaskClient, world: World, receiver: Receiver, code: int,
) -> None:
    for header in ("900", *(ahead(901, form) for form in FORMATS)):
        receiver.respond = receivers.status(code, Retry_After=header)
        after = attempt_at(finish(api, receiver.url), clock.now())
        assert after.next_attempt_at is not None
        assert 800 < (after.next_attempt_at - clock.now()).total_seconds() <= 1081, header
        assert deliver_webhook.run_once(after.id, now=lambda: later(800)) is None  # not before


@one_database
@pytest.mark.parametrize("code", [302, 402, 408, 425, 500, 502, 504])
def test_retry_after_of_any_other_answer_says_nothing(
    api: FlaskClient, world: World, receiver: Receiver, code: int,
) -> None:
    receiver.respond = receivers.status(code, Retry_After="900")
    after = attempt_at(finish(api, receiver.url), clock.now())
    assert after.next_attempt_at is not None and (after.next_attempt_at - clock.now()).total_seconds() <= 6


@one_database
def test_an_absurd_retry_after_is_capped_or_ignored(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """As it comes over the wire, where a header may hold any byte."""
    capped = [b"1000000000", b"9" * 400, b"Fri, 31 Dec 9999 23:59:59 GMT"]
    ignored = [b"", b"-5", b"0", b"1.5", b"15, 30", b"15\r\nRetry-After: 30", b"\xe9", b"\xff\xfe\x00", b"soon",
               "\uff11\uff15".encode(), b"Sun, 06 Nov 1994 08:49:37 GMT", b"x" * 60_000, b"9" * 60_000]
    for value in (*capped, *ignored):
        def respond(handler: Any, _: int) -> None:
            handler.wfile.write(b"HTTP/1.1 429 x\r\nContent-Length: 0\r\nRetry-After: " + value + b"\r\n\r\n")

        receiver.respond = respond
        after = attempt_at(finish(api, receiver.url), clock.now())
        assert after.next_attempt_at is not None and after.last_response == 429, value[:40]
        wait = (after.next_attempt_at - clock.now()).total_seconds()
        assert DAY - 10 < wait <= DAY if value in capped else 0 < wait <= 6, value[:40]


@one_database
def test_a_retry_after_of_the_last_attempt_prolongs_nothing(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    world.set(CALLBACK_SCHEDULE_SECONDS="0")
    receiver.respond = receivers.status(429, Retry_After="900")
    after = attempt_at(finish(api, receiver.url), clock.now())
    assert (after.state, after.next_attempt_at) == ("exhausted", None)
    assert world.count("outbox") == 0
