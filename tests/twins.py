"""One request to two applications that differ in nothing but their database, and everything that must hold of any
answer."""
from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pydantic_core
from flask import Flask
from sqlalchemy import Engine, event, insert, select, text
from werkzeug.datastructures import Headers
from werkzeug.test import run_wsgi_app

from app import db, schema, status
from app.api import create_app, problems
from tests.conftest import forget_settings

CALLBACK = "http://127.0.0.1:9/"
SETTINGS = {
    "API_TOKENS": "alice:alice-token,bob:bob-token", "CALLBACK_ALLOW": "127.0.0.1:9",
    "CALLBACK_SCHEDULE_SECONDS": "0,5"}
MEMBERS = {"/jobs": {"n", "kind", "callback_url"}, "/notes": {"text", "callback_url"}}

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+Z")
_OF_ITS_OWN = {"X-Request-Id", "Retry-After", "ETag", "Sunset", "Content-Length", "Date"}


@dataclass(frozen=True)
class Call:
    """A request as a WSGI server passes it on; `{mine}` and the like in its path stand for jobs that are there."""

    method: str = "POST"
    path: str = "/jobs"
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    length: str | None = None  # what Content-Length says; None: the truth
    proxied: bool = False  # whether the application believes one proxy

    @property
    def resource(self) -> str:
        """The path, of which slashes at its ends make no other one."""
        return "/" + self.path.strip("/")

    def environ(self, ids: dict[str, str]) -> dict[str, Any]:
        path = re.sub(r"\{(\w+)\}", lambda found: ids.get(found[1], found[0]), self.path)
        made: dict[str, Any] = {
            "REQUEST_METHOD": self.method, "PATH_INFO": path, "QUERY_STRING": self.query, "SCRIPT_NAME": "",
            "SERVER_NAME": "127.0.0.1", "SERVER_PORT": "8140", "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": "127.0.0.1:8140",
            "REMOTE_ADDR": "127.0.0.1", "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.multithread": True,
            "wsgi.multiprocess": False, "wsgi.run_once": False, "wsgi.errors": io.StringIO(),
            "wsgi.input": io.BytesIO(self.body), "wsgi.input_terminated": True}
        for name, value in self.headers:
            name = name.upper().replace("-", "_")
            made[name if name in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{name}"] = value
        if self.length is not None:
            made["CONTENT_LENGTH"] = self.length
        elif "HTTP_TRANSFER_ENCODING" not in made:
            made.setdefault("CONTENT_LENGTH", str(len(self.body)))
        return made


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Headers
    body: bytes

    @property
    def problem(self) -> str | None:
        return json.loads(self.body)["type"].rpartition("/")[2] if self.status >= 400 and self.body else None

    def alike(self) -> tuple[Any, ...]:
        """What is the same on both databases."""
        headers = sorted(
            (name, _ID.sub("<id>", value)) for name, value in self.headers if name not in _OF_ITS_OWN)
        told = sorted(_OF_ITS_OWN & set(self.headers.keys()) - {"Content-Length"})
        body = self.body.decode()
        return self.status, headers, told, body if body.startswith("<") else _TIME.sub("<time>", _ID.sub("<id>", body))


class Twin:
    """One of the two databases, with jobs and a note in it, to which it returns after each call."""

    def __init__(self, url: str) -> None:
        os.environ["DATABASE_URL"] = url
        forget_settings()
        db.dispose()
        self.engine: Engine = db.engine()
        if self.engine.dialect.name == "sqlite":  # nobody cuts the power
            event.listen(self.engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
        self.ids = _inhabit(create_app())
        self.kept = self.rows()
        db._engine = None  # not disposed of: it is used again

    @contextmanager
    def here(self) -> Iterator[None]:
        db._engine, db._engine_pid = self.engine, os.getpid()
        try:
            yield
        finally:
            db._engine = None

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        with self.engine.begin() as tx:
            return {table.name: [tuple(row) for row in tx.execute(select(table).order_by(*table.primary_key))]
                    for table in schema.metadata.sorted_tables}

    def restore(self) -> None:
        with self.engine.begin() as tx:
            for table in reversed(schema.metadata.sorted_tables):
                tx.execute(table.delete())
            for table in schema.metadata.sorted_tables:
                if kept := self.kept[table.name]:
                    tx.execute(insert(table), [dict(zip(table.columns.keys(), row)) for row in kept])
        status.forget(list(self.ids.values()))

    def ask(self, app: Flask, call: Call) -> Answer:
        with self.here():
            parts, line, headers = run_wsgi_app(app, call.environ(self.ids), buffered=True)
        return Answer(int(line.split()[0]), Headers(headers), b"".join(parts))


def _inhabit(app: Flask) -> dict[str, str]:
    """A job in each state that matters, one of another owner, and a note."""
    api = app.test_client()

    def submit(owner: str = "alice", **members: Any) -> str:
        headers = {"Authorization": f"Bearer {owner}-token"}
        job_id: str = api.post("/jobs", json={"n": 5, **members}, headers=headers).json["job_id"]
        return job_id

    ids = {"mine": submit(), "theirs": submit("bob"), "ended": submit(), "told": submit(callback_url=CALLBACK),
           "running": submit(), "expired": submit()}
    own = {"Authorization": "Bearer alice-token"}
    for name in ("ended", "told", "expired"):
        assert api.post(f"/jobs/{ids[name]}/cancel", headers=own).status_code == 200
    assert api.post("/notes", json={"text": "a note"}, headers=own).status_code == 202
    with db.transaction() as tx:
        tx.execute(text("UPDATE jobs SET expires_at = finished_at WHERE id = :id"), {"id": ids["expired"]})
        tx.execute(text("UPDATE jobs SET status = 'running', attempt = 1, started_at = created_at,"
                        " lease_until = created_at WHERE id = :id"), {"id": ids["running"]})
    status.forget(list(ids.values()))
    return ids


class Twins:
    """Both databases behind the same application."""

    def __init__(self, *urls: str) -> None:
        self.twins = [Twin(url) for url in urls]
        self.apps = {}
        for proxied in (False, True):
            os.environ["TRUSTED_PROXIES"] = str(int(proxied))
            forget_settings()
            self.apps[proxied] = create_app()

    def dispose(self) -> None:
        for twin in self.twins:
            twin.engine.dispose()

    def check(self, call: Call) -> Answer:
        """Asks both, and checks all that must hold of any answer to anything."""
        answers = [self._check_one(twin, call) for twin in self.twins]
        first, second = (answer.alike() for answer in answers)
        assert first == second, "the databases answer differently"
        return answers[0]

    def _check_one(self, twin: Twin, call: Call) -> Answer:
        app = self.apps[call.proxied]
        answer = twin.ask(app, call)
        check_answer(call, answer)
        rows = twin.rows()
        if rows == twin.kept:
            return answer
        try:
            check_change(call, answer, twin.kept, rows)
            if call.resource in MEMBERS and "Idempotency-Key" in dict(call.headers):
                check_replay(answer, twin.ask(app, call))
                assert twin.rows() == rows
        finally:
            twin.restore()
        return answer


def check_answer(call: Call, answer: Answer) -> None:
    """No 5xx, no HTML beside the pages, a problem of the table for each error."""
    page = answer.headers.get("Content-Type", "").startswith("text/html") and bool(answer.body)
    assert not page or answer.status == 200 and call.path.startswith(("/problems/", "/docs")), "HTML"
    assert answer.status < 500 or call.path.startswith("/health/ready") and answer.status == 503, answer.body
    assert "X-Request-Id" in answer.headers and "Cache-Control" in answer.headers
    assert answer.status in (200, 202, 304) or answer.status >= 400
    if 400 <= answer.status < 500:
        check_problem(call.method, answer)


def check_problem(method: str, answer: Answer) -> None:
    """The shape of RFC 9457, and what the status asks for."""
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert "Allow" in answer.headers if answer.status == 405 else True
    assert "WWW-Authenticate" in answer.headers if answer.status == 401 else True
    if method == "HEAD":
        return
    told = json.loads(answer.body.decode("ascii"))
    entry = problems.TABLE[told["type"].rpartition("/problems/")[2]]
    assert told["status"] == answer.status == entry.status and told["title"] == entry.title
    assert told["detail"] and told["instance"].startswith("/") and told["request_id"] == answer.headers["X-Request-Id"]
    assert "Traceback" not in told["detail"]
    if told["type"].endswith("/invalid-input"):
        assert told["errors"]
        for flaw in told["errors"]:
            assert flaw.keys() == {"pointer", "detail"} and flaw["detail"]
            assert re.fullmatch(r"#(/([A-Za-z0-9._!$&'()*+,;=:@?-]|%[0-9A-F]{2}|~[01])*)*", flaw["pointer"]), flaw


def check_change(call: Call, answer: Answer, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Only an accepted POST changes anything; a submission makes just what it says."""
    assert call.method == "POST" and answer.status in (200, 202), "something was kept of a refused request"
    path = call.resource
    if path not in MEMBERS:
        assert re.fullmatch(r"/jobs/\{\w+\}/(cancel|redeliver)", path)
        return
    given = pydantic_core.from_json(call.body, allow_inf_nan=False)  # a strict parser of its own
    assert isinstance(given, dict) and given.keys() <= MEMBERS[path] and answer.status == 202
    number = given.get("n", 0)
    assert type(number) in (int, float) and number == int(number) and isinstance(given.get("text", ""), str)
    more = {name: len(after[name]) - len(before[name]) for name in after}
    expected = dict.fromkeys(after, 0) | {"jobs": 1, "outbox": 1, "notes": int(path == "/notes")}
    assert more == expected | {"idempotency_keys": int("Idempotency-Key" in dict(call.headers))}


def check_replay(first: Answer, again: Answer) -> None:
    """The first answer again, byte for byte."""
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["Location"] == first.headers["Location"]
    assert again.headers["Idempotent-Replayed"] == "true"
