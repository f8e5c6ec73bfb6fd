"""The catalogue of problems: each is reached by a real request, has all that RFC 9457 and its status ask for, and a
page. A new entry needs a way to it here."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app import db, errors
from app.api import problems
from tests.conftest import World, one_database
from tests.running import run_to_end, submit

Way = Callable[[FlaskClient, World], TestResponse]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "PROPFIND")
ARGUMENTS = {"job_id": "00000000-0000-7000-8000-000000000000", "note_id": "1", "name": "nope"}
JSON = "application/json"


def problem(answer: TestResponse, name: str) -> dict[str, Any]:
    """Checks all members and headers of this problem; returns it."""
    entry = problems.TABLE[name]
    assert answer.status_code == entry.status, answer.text
    assert answer.content_type == "application/problem+json" and answer.headers["Cache-Control"] == "no-store"
    told: dict[str, Any] = answer.json
    assert told["type"] == f"/problems/{name}" and told["title"] == entry.title and told["status"] == entry.status
    assert told["detail"] and told["instance"] == quote(answer.request.path)
    assert told["request_id"] == answer.headers["X-Request-Id"]
    assert ("errors" in told) is (name == "invalid-input")
    assert all(flaw.keys() == {"pointer", "detail"} for flaw in told.get("errors", ()))
    assert not answer.headers.get("Retry-After") or answer.headers["Retry-After"].isdigit()
    assert ("Retry-After" in answer.headers) is (entry.status in (429, 503))
    assert ("Allow" in answer.headers) is (entry.status == 405)
    assert ("WWW-Authenticate" in answer.headers) is (entry.status == 401)
    assert "Traceback" not in answer.text
    return told


# --- a way to each ---


def _reused(api: FlaskClient, world: World) -> TestResponse:
    first = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    answer = api.post("/jobs", json={"n": 6}, headers={"Idempotency-Key": "k"})
    assert answer.json["location"] == answer.headers["Location"] == first.headers["Location"]
    return answer


def _finished(api: FlaskClient, world: World) -> TestResponse:
    job_id = submit(api, n=5)
    run_to_end(job_id)
    return api.post(f"/jobs/{job_id}/cancel")


def _expired(api: FlaskClient, world: World) -> TestResponse:
    job_id = submit(api, n=5)
    run_to_end(job_id)
    world.sql("UPDATE jobs SET expires_at = finished_at")
    world.redis.flushall()
    answer = api.get(f"/jobs/{job_id}")
    assert {"job_id", "kind", "job_status", "finished_at", "expired_at"} <= answer.json.keys()
    return answer


def _rate_limited(api: FlaskClient, world: World) -> TestResponse:
    world.set(RATE_LIMIT="1/minute")
    assert api.get("/jobs").status_code == 200
    return api.get("/jobs")


def _backlog_full(api: FlaskClient, world: World) -> TestResponse:
    world.set(MAX_BACKLOG=1)
    submit(api, n=5)
    return api.post("/jobs", json={"n": 5})


def _unauthorized(api: FlaskClient, world: World) -> TestResponse:
    world.set(API_TOKENS="alice:secret")
    return api.get("/jobs", headers={"Authorization": "Bearer other"})


def _internal(api: FlaskClient, world: World) -> TestResponse:
    """A database that refuses the row."""
    world.sql("CREATE TRIGGER odd BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'odd'); END")
    return api.post("/jobs", json={"n": 5})


def _unavailable(api: FlaskClient, world: World) -> TestResponse:
    take_away_database(world)
    return api.get("/notes")


def _busy(api: FlaskClient, world: World) -> TestResponse:
    places = api.application.extensions["uketsuke_places"]
    while places.acquire(blocking=False):
        pass
    return api.post("/jobs", json={"n": 5})


WAYS: dict[str, Way] = {
    "malformed-json": lambda api, world: api.post("/jobs", data=b'{"n": NaN}', content_type=JSON),
    "bad-idempotency-key": lambda api, world: api.post("/notes", json={"text": "a"}, headers={"Idempotency-Key": ""}),
    "bad-request": lambda api, world: api.get("/jobs", environ_overrides={"QUERY_STRING": "limit=\xff"}),
    "unauthorized": _unauthorized,
    "not-found": lambda api, world: api.get("/notes/1"),
    "method-not-allowed": lambda api, world: api.delete("/notes/1"),
    "finished": _finished,
    "unfinished": lambda api, world: api.post(
        f"/jobs/{submit(api, n=5, callback_url='http://192.0.0.9/')}/redeliver"),
    "no-callback": lambda api, world: api.post(f"/jobs/{submit(api, n=5)}/redeliver"),
    "expired": _expired,
    "too-large": lambda api, world: api.post("/jobs", data=b" " * (1024 * 1024 + 1), content_type=JSON),
    "not-json": lambda api, world: api.post("/jobs", data=b"{}", content_type="text/plain"),
    "invalid-input": lambda api, world: api.post("/jobs", json={"n": -1}),
    "key-reused": _reused,
    "rate-limited": _rate_limited,
    "internal": _internal,
    "busy": _busy,
    "unavailable": _unavailable,
    "backlog-full": _backlog_full,
}


def take_away_database(world: World) -> None:
    db.dispose()
    world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")


def test_a_way_to_each_problem_is_known() -> None:
    assert WAYS.keys() == problems.TABLE.keys()
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", name) for name in problems.TABLE)


@one_database
@pytest.mark.parametrize("name", problems.TABLE)
def test_each_problem_is_reached_and_explained(api: FlaskClient, world: World, name: str) -> None:
    world.set(CALLBACK_ALLOW="192.0.0.9/32")
    told = problem(WAYS[name](api, world), name)
    assert api.get(told["type"]).status_code == 200


@one_database
def test_what_nobody_expected_is_a_problem_too(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    run_to_end(job_id)
    world.sql("UPDATE jobs SET result = '{'")
    world.redis.flushall()
    assert "{" not in problem(api.get(f"/jobs/{job_id}"), "internal")["detail"]


@one_database
def test_no_condition_of_a_poll_is_refused_without_a_problem(api: FlaskClient) -> None:
    path = f"/jobs/{submit(api, n=5)}"
    for value in ("*", '"other"', "x"):
        answers = [api.get(path, headers={"If-None-Match": tag, "If-Match": value}) for tag in ('"other"', "*")]
        assert [answer.status_code for answer in answers] == [200, 304] and answers[1].data == b""


# --- the pages ---


class Page(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@one_database
def test_each_page_is_whole_in_itself_and_needs_no_token(api: FlaskClient, world: World) -> None:
    world.set(API_TOKENS="alice:secret")
    for name, entry in problems.TABLE.items():
        answer = api.get(f"/problems/{name}")
        assert answer.status_code == 200 and answer.content_type == "text/html; charset=utf-8"
        page = Page(answer.text)
        assert answer.text.startswith("<!doctype html>") and ("html", {"lang": "en"}) in page.tags
        assert entry.title in page.words and entry.advice in page.words and str(entry.status) in page.words
        assert not {"script", "link", "img", "iframe", "object", "form", "base"} & {tag for tag, _ in page.tags}
        assert not {"src", "href", "srcset", "style"} & {name for _, attributes in page.tags for name in attributes}
        assert "url(" not in answer.text and "@import" not in answer.text


@one_database
def test_a_name_with_markup_is_an_unknown_problem(api: FlaskClient) -> None:
    for name in ("nope", "<script>alert(1)</script>", "%3Cb%3E", "{{ 7 * 7 }}", "expired%00", "EXPIRED", "é", "%ff"):
        answer = api.get(f"/problems/{name}")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"  # so that no browser takes it for a page
        assert "49" not in problem(answer, "not-found")["detail"]


@one_database
def test_a_page_shows_markup_of_the_catalogue_as_text(api: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problems.TABLE, "a&b", problems.Entry(400, "<b>", "<script>{{ 7 * 7 }}"))
    page = Page(api.get("/problems/a&b").text)
    assert "<b>" in page.words and "<script>{{ 7 * 7 }}" in page.words and "/problems/a&b" in page.words


# --- every route ---


def resources(app: Flask) -> dict[str, set[str]]:
    """Each path that there is, filled in, with its methods."""
    adapter, found = app.url_map.bind("127.0.0.1"), dict[str, set[str]]()
    for rule in app.url_map.iter_rules():
        path = adapter.build(rule.endpoint, {name: ARGUMENTS.get(name, "nope") for name in rule.arguments})
        found.setdefault(path, set()).update(rule.methods or ())
    return found


def requests_of(api: FlaskClient) -> Iterator[tuple[str, str]]:
    """Every method of every path."""
    for path, methods in resources(api.application).items():
        for method in sorted(methods - {"OPTIONS", "HEAD"}):
            yield method, path


def is_open(path: str) -> bool:
    return path.startswith(("/health", "/openapi.json", "/docs", "/problems/"))


@one_database
def test_every_other_method_of_every_route_is_told_which_there_are(api: FlaskClient) -> None:
    for path, methods in resources(api.application).items():
        for method in set(METHODS) - methods:
            answer = api.open(path, method=method)
            assert answer.status_code == 405
            assert method == "HEAD" or problem(answer, "method-not-allowed")
            assert answer.headers["Allow"] == ", ".join(sorted(methods))


@one_database
def test_whoever_asks_for_another_protocol_is_answered_in_this_one(api: FlaskClient) -> None:
    for path, methods in resources(api.application).items():
        asked = {"Connection": "Upgrade", "Upgrade": "websocket"}
        if "GET" in methods:
            assert api.get(path, headers=asked).status_code == api.get(path).status_code


@one_database
def test_every_route_tells_its_methods_to_options(api: FlaskClient) -> None:
    for path, methods in resources(api.application).items():
        answer = api.options(path)
        assert answer.status_code == 200 and answer.data == b""
        assert set(answer.headers["Allow"].split(", ")) == methods


@one_database
def test_every_route_but_the_open_ones_asks_for_a_token(api: FlaskClient, world: World) -> None:
    world.set(API_TOKENS="alice:secret")
    for method, path in requests_of(api):
        answer = api.open(path, method=method)
        if is_open(path):
            assert answer.status_code in (200, 404, 503)
        else:
            assert problem(answer, "unauthorized") and answer.headers["WWW-Authenticate"].startswith("Bearer")


@one_database
def test_no_route_shows_anything_but_a_problem_while_the_database_is_away(api: FlaskClient, world: World) -> None:
    take_away_database(world)
    bodies: dict[str, Any] = {"/jobs": {"n": 5}, "/notes": {"text": "a"}}
    for method, path in requests_of(api):
        answer = api.open(path, method=method, json=bodies.get(path) if method == "POST" else None)
        if answer.status_code >= 400 and path != "/health/ready":
            problem(answer, "not-found" if path in ("/problems/nope", "/docs/nope") else "unavailable")
        else:
            assert is_open(path) or path == "/metrics"


@one_database
def test_a_head_of_an_error_has_its_headers_and_no_body(api: FlaskClient) -> None:
    for path, methods in resources(api.application).items():
        if "HEAD" in methods:
            got, head = api.get(path), api.head(path)
            assert head.status_code == got.status_code and head.data == b""
            assert head.content_type == got.content_type


@one_database
def test_every_address_beside_the_routes_is_not_found(api: FlaskClient) -> None:
    for path in resources(api.application):
        for odd in (f"{path}/x/y", f"/x{path}", f"{path}%00", path + "\u00e9"):
            problem(api.get(odd), "not-found")


@one_database
def test_an_error_of_ours_without_a_problem_is_ours_to_mend(api: FlaskClient) -> None:
    with api.application.test_request_context("/x"):
        made = problems.as_problem(errors.UketsukeError("secret"))
    assert made.name == "internal" and "secret" not in made.detail
