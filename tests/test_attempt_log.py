"""GET /jobs/<id>/deliveries: what is kept of each attempt, and that it can be shown to anybody."""
from __future__ import annotations

import gzip
import http.server
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

from app import excerpts
from app.api import create_app
from tasks import deliver_webhook, rescue_stalled, run_job
from tests import paper
from tests import receiver as receivers
from tests.asking import deliver_all, problem, redeliver
from tests.conftest import World, one_database
from tests.receiver import Receiver
from tests.running import Crash, later, submit

Respond = Callable[[http.server.BaseHTTPRequestHandler, int], None]
ODD = "\ufffd"


def says(body: bytes, code: int = 500, **headers: str) -> Respond:
    def respond(handler: http.server.BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return respond


def speaks(answer: bytes) -> Respond:
    """Not what the server's own code would say."""
    def respond(handler: http.server.BaseHTTPRequestHandler, _: int) -> None:
        handler.wfile.write(answer)
        handler.close_connection = True

    return respond


def rows_of(api: FlaskClient, job_id: str, **more: Any) -> list[dict[str, Any]]:
    return api.get(f"/jobs/{job_id}/deliveries", **more).json["deliveries"]


def told(api: FlaskClient, receiver: Receiver, respond: Respond | None = None) -> dict[str, Any]:
    """The row of an attempt that was answered so."""
    receiver.respond = respond
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    deliver_all()
    (row,) = rows_of(api, job_id)
    return row


# --- the excerpt ---


@pytest.mark.parametrize("body,shown", [
    (b"a" * 1024, "a" * 1024),
    (b"a" * 1024 + b"b", "a" * 1024),
    ("é".encode() * 600, "é" * 512),
    (b"a" + "é".encode() * 600, "a" + "é" * 511),  # the last one would be cut in two
    (b"a" * 1021 + "\U0001f600x".encode(), "a" * 1021),
    (b"a" * 1020 + "\U0001f600x".encode(), "a" * 1020 + "\U0001f600"),
    (b"a\xc3", "a" + ODD),  # the answer itself ends so
    (b"\xff" * 2000, ODD * 1024),
    (b"a" * 1023 + b"\r\nb", "a" * 1023),
])
def test_an_excerpt_is_the_first_kibibyte_in_whole_characters(body: bytes, shown: str) -> None:
    assert excerpts.of(body, None) == shown


def test_an_excerpt_comes_through_to_the_client(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """All of it, on both databases; more characters than another text may have."""
    body = "\x00\x1b[31m \u202eeno\ud800".encode("utf-8", "surrogatepass") + b"x" * 5000
    shown = told(api, receiver, says(body))["excerpt"]
    assert shown.startswith(f"{ODD}{ODD}[31m {ODD}eno{ODD * 3}xxx") and shown.endswith("x")
    assert len(shown) == 1024 - 2  # of the bytes, U+202E had three

    row = told(api, receiver, says(b"x" * 5000))
    assert (row["excerpt"], row["response_code"], row["error"]) == ("x" * 1024, 500, None)


@pytest.mark.parametrize("text", [
    "\x00", "\x07", "\x08", "\x0b", "\x0c", "\r", "\x1b", "\x1f", "\x7f", "\x80", "\x85", "\x9b", "\x9f",  # controls
    "\u061c", "\u200e", "\u200f", "\u202a", "\u202e", "\u2066", "\u2069",  # direction
    "\xad", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\U000e0041",  # nothing to see
    "\u2028", "\u2029", "\ud800", "\udfff", "\ufdd0", "\ufdef", "\ufffe", "\uffff", "\U0010ffff", "\U0001fffe"])
def test_what_could_deceive_is_replaced(text: str) -> None:
    assert excerpts.safe(f"a{text}b") == excerpts.line(f"a{text}b") == f"a{ODD}b"


def test_everything_else_is_shown_as_it_came() -> None:
    text = "<b>\tété, 日本語, \U0001f600, שלום, e\u0301, \xa0, \ue000\n"
    assert excerpts.safe(text) == text
    assert excerpts.safe("a\r\nb\r\n") == "a\nb\n" and excerpts.safe("a\rb") == f"a{ODD}b"
    assert excerpts.line("a\tb\r\nc") == f"a{ODD}b{ODD}{ODD}c"


@given(st.binary(max_size=1100))
def test_any_answer_becomes_a_text_that_can_be_shown_and_stored(body: bytes) -> None:
    shown = excerpts.of(body, None)
    assert shown is not None and excerpts.safe(shown) == shown and len(shown) <= 1024
    assert shown.encode().decode() == shown
    assert not {unicodedata.category(each) for each in shown} & {"Cf", "Cs", "Zl", "Zp"}
    assert {each for each in shown if unicodedata.category(each) == "Cc"} <= {"\n", "\t"}


def test_an_empty_answer_has_an_empty_excerpt(api: FlaskClient, world: World, receiver: Receiver) -> None:
    row = told(api, receiver)
    assert (row["response_code"], row["excerpt"], row["error"]) == (204, "", None)


@one_database
def test_a_compressed_answer_is_not_unpacked(api: FlaskClient, world: World, receiver: Receiver) -> None:
    """A bomb costs nothing, and its bytes are no text."""
    bomb = gzip.compress(b"x" * 10_000_000)
    row = told(api, receiver, says(bomb, Content_Encoding="gzip"))
    assert (row["response_code"], row["excerpt"], row["error"]) == (500, None, None)
    assert told(api, receiver, says(b"plain", Content_Encoding=" Identity "))["excerpt"] == "plain"
    assert told(api, receiver, says(b"", Content_Encoding="br"))["excerpt"] == ""


# --- the reason ---


def test_a_reason_does_not_carry_what_the_receiver_could_deceive_with(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    row = told(api, receiver, speaks(b"NONSENSE \x1b[31m\x00\x85\t all is well\n\r\n"))
    assert row["response_code"] is row["excerpt"] is None
    assert row["error"] == "not HTTP"


def test_an_answer_that_breaks_off_has_its_code_and_why(api: FlaskClient, world: World, receiver: Receiver) -> None:
    row = told(api, receiver, speaks(b"HTTP/1.1 500 x\r\nContent-Length: 100\r\n\r\nabc"))
    assert row["response_code"] == 500 and row["excerpt"] is None and row["error"] == "answer broke off"


def test_an_interrupted_attempt_and_a_refused_one_say_so(api: FlaskClient, world: World, receiver: Receiver) -> None:
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    (delivery_id,) = world.sql("SELECT id FROM deliveries")[0]

    def die(*_: Any) -> Any:
        raise Crash

    with pytest.raises(Crash):
        deliver_webhook.run_once(delivery_id, post=die)
    assert rows_of(api, job_id) == []
    rescue_stalled.run_once(later(31), {})
    world.set(CALLBACK_ALLOW="")
    deliver_webhook.run_once(delivery_id, now=lambda: later(60))
    interrupted, refused = rows_of(api, job_id)
    assert interrupted["error"] == "interrupted: the courier died; it is not known what arrived"
    assert interrupted["duration_seconds"] == 0 and refused["error"].startswith("refused: 127.0.0.0/8 ")
    for number, row in enumerate((interrupted, refused), 1):
        assert (row["attempt"], row["webhook_id"]) == (number, delivery_id)
        assert row["response_code"] is row["excerpt"] is None
    assert receiver.hooks == []


# --- who may see it, and what the papers say ---


def test_the_log_belongs_to_the_owner_of_the_job(world: World, receiver: Receiver) -> None:
    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    api = create_app().test_client()
    ada, bob = ({"headers": {"Authorization": f"Bearer secret-{letter}"}} for letter in "ab")
    receiver.respond = says(b"for ada only")
    job_id = api.post("/jobs", json={"n": 5, "callback_url": receiver.url}, **ada).json["job_id"]
    run_job.run_once(job_id)
    deliver_all()
    answer = api.get(f"/jobs/{job_id}/deliveries", **bob)
    assert problem(answer) == (404, "not-found") and "ada only" not in answer.text
    assert problem(api.get(f"/jobs/{job_id}/deliveries")) == (401, "unauthorized")
    assert rows_of(api, job_id, **ada)[0]["excerpt"] == "for ada only"


@one_database
def test_every_member_is_described_and_in_the_papers(api: FlaskClient, world: World, receiver: Receiver) -> None:
    row = told(api, receiver, receivers.status(503))
    described = api.get("/openapi.json").json["components"]["schemas"]["DeliveryAttempt"]["properties"]
    assert set(described) == set(row) == {name.strip("`") for name in paper.table("an attempt's")}
    assert all(member.get("description") for member in described.values())
    assert "Seconds" in described["duration_seconds"]["description"]
    assert "1,024 bytes" in described["excerpt"]["description"]


def test_all_rounds_are_in_one_list(api: FlaskClient, world: World, receiver: Receiver) -> None:
    receiver.respond = says(b"no", 400)
    job_id = submit(api, n=5, callback_url=receiver.url)
    run_job.run_once(job_id)
    deliver_all()
    for _ in range(3):
        redeliver(api, job_id)
        deliver_all()
    rows = rows_of(api, job_id)
    assert len({row["webhook_id"] for row in rows}) == len(rows) == 4 and {row["excerpt"] for row in rows} == {"no"}
