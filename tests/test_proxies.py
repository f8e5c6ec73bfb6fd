"""Addresses in answers: paths that no client can bend, with a prefix that only a trusted proxy can give."""
from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from tests import nginx
from tests.conftest import World, one_database
from tests.processes import Site
from tests.wire import CHUNKED_JOB, JOB, Wire, request, wire

FORWARDED = {
    "X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "evil", "X-Forwarded-For": "evil",
    "X-Forwarded-Port": "666", "X-Forwarded-Prefix": "/evil", "X-Forwarded-Server": "evil.example",
    "Forwarded": "for=evil;host=evil.example", "X-Original-URL": "/evil", "X-Rewrite-URL": "/evil",
    "X-Script-Name": "/evil", "X-Host": "evil.example", "X-Forwarded-Path": "/evil", "X-Forwarded-Scheme": "evil",
    "Origin": "http://evil.example", "Referer": "http://evil.example/"}
ODD = [
    "/", "//", "//jobs", "/jobs/", "/notes/", "/health/", "/jobs//x", "/nowhere", "/problems", "/problems/",
    "/problems/x", "/problems/not-found/", "/health/ready/",
    "/jobs?limit=x", "/notes?limit=x", "/jobs/%2e%2e/notes", "/%0d%0aX-B: c"]


def application(world: World, **settings: Any) -> FlaskClient:
    from app.api import create_app

    world.set(**settings)
    return create_app().test_client()


def addresses(answer: Any) -> set[str]:
    """Every address that an answer names."""
    named = {answer.headers["Location"]} if "Location" in answer.headers else set()
    named |= set(re.findall("<(.*?)>", answer.headers.get("Link", "")))
    if "json" in answer.headers["Content-Type"] and answer.text:
        document = json.loads(answer.text)
        named |= {document[name] for name in ("type", "instance", "location", "status_url") if name in document}
    return named


def everything(client: FlaskClient, **more: Any) -> Iterator[Any]:
    """An answer of every route to every method, and of what is no route; twice, so that keys are replayed."""
    ids = {}
    for path, body in [("/jobs", {"n": 5}), ("/notes", {"text": "a"})] * 2:
        answer = client.post(path, json=body, **{**more, "headers": {**more["headers"], "Idempotency-Key": path}})
        assert answer.status_code == 202
        yield answer
        ids[path] = answer.json["job_id"]
    yield client.post("/jobs", json={"n": 6}, **{**more, "headers": {**more["headers"], "Idempotency-Key": "/jobs"}})
    known = {"job_id": ids["/jobs"], "note_id": "1", "name": "not-found"}
    rules = [re.sub("<(?:.*:)?(.*?)>", lambda found: known.get(found[1], "x"), rule.rule)
             for rule in client.application.url_map.iter_rules()]
    assert len(rules) > 5
    for path in [*rules, *ODD]:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            yield client.open(path, method=method, **more)


@one_database
@pytest.mark.parametrize("proxies", [0, 1, 2])
def test_no_answer_repeats_what_a_client_says_about_where_it_came_from(world: World, proxies: int) -> None:
    """Also behind proxies: what stands before their values is the client's."""
    client = application(world, TRUSTED_PROXIES=proxies)
    behind = {name: ", ".join([value, *["good", "good"][:proxies]]) for name, value in FORWARDED.items()}
    behind["X-Forwarded-Prefix"] = ", ".join(["/evil", *["/good", "/"][:proxies]])
    for answer in everything(client, base_url="http://evil.example:666", headers=behind):
        said = f"{answer.headers}{answer.text}"
        assert "evil" not in said and ":666" not in said, said
        assert not 300 <= answer.status_code < 400, said
        assert all(named.startswith("/good/" if proxies else "/") for named in addresses(answer)), said


@one_database
@pytest.mark.parametrize("proxies,prefix,counts", [
    (1, "/desk", "/desk"), (1, "/a/b-c_d.e~f", "/a/b-c_d.e~f"), (1, "/desk/", "/desk"), (1, "/", ""), (1, "", ""),
    (1, "/evil, /desk", "/desk"), (2, "/evil, /desk, /inner", "/desk"), (2, "/desk", ""), (0, "/desk", ""),
    *[(1, odd, "") for odd in (
        "//evil.example", "http://evil.example", "/a//b", '"/a"b', "/a b", "/a\tb", "/a'", "/a>", "/a;b", "/..",
        "/a/../b", "/a/..", "/.", "/./a", "evil", "/é", "/%2f", "/a?b", "/a#b", "/a\\b", "/a@b")]])
def test_a_prefix_is_a_plain_path_of_a_trusted_proxy_or_nothing(
    world: World, proxies: int, prefix: str, counts: str,
) -> None:
    client = application(world, TRUSTED_PROXIES=proxies)
    told = {"X-Forwarded-Prefix": prefix}
    note = client.post("/notes", json={"text": "a"}, headers=told)
    assert note.headers["Location"] == f"{counts}/jobs/{note.json['job_id']}"
    assert note.headers["Link"] == f'<{counts}/notes/{note.json["id"]}>; rel="related"'
    assert note.json["status_url"] == f"{counts}/jobs/{note.json['job_id']}"
    problem = client.get("/nowhere", headers=told).json
    assert (problem["type"], problem["instance"]) == (f"{counts}/problems/not-found", f"{counts}/nowhere")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, valkey: Any) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("web"), REDIS_URL=valkey.url, WEB_WORKERS=1, TRUSTED_PROXIES=1) as site:
        site.start_alone("web")
        site.wait_answering()
        yield site


def test_a_whole_address_as_the_target_says_nothing(web: Site) -> None:
    with wire(web.port) as connection:
        connection.send(request("POST http://evil.example/jobs", b"Content-Length: 8", body=JOB))
        assert connection.answer().headers["location"].startswith("/jobs/")


Ask = Callable[..., requests.Response]


@contextlib.contextmanager
def through(folder: Path, configuration: str, web: Site) -> Iterator[tuple[int, Ask]]:
    """A client of the documented nginx in front of `web`."""
    with nginx.nginx(folder, configuration, web.port) as port, web.client() as session:

        def ask(method: str, path: str, **more: Any) -> requests.Response:
            return session.request(method, f"http://127.0.0.1:{port}{path}", timeout=20, allow_redirects=False, **more)

        yield port, ask


@pytest.mark.parametrize("prefix", ["/desk", ""])
def test_every_address_leads_through_nginx_to_where_it_says(tmp_path: Path, web: Site, prefix: str) -> None:
    configuration = nginx.documented() if prefix else nginx.without_prefix(nginx.documented())
    with through(tmp_path, configuration, web) as (_, ask):
        spoofed = dict.fromkeys(("X-Forwarded-Prefix", "X-Forwarded-Host", "X-Forwarded-For"), "/evil")
        note = ask("POST", f"{prefix}/notes", json={"text": "a"}, headers=spoofed)
        assert note.status_code == 202
        problem = ask("POST", f"{prefix}/jobs", json={"n": "many"}, headers=spoofed)
        assert problem.json()["instance"] == f"{prefix}/jobs"
        named = addresses(note) | {problem.json()["type"]}
        assert len(named) == 3 and all(address.startswith(f"{prefix}/") for address in named)
        for address in named:
            assert ask("GET", address).status_code == 200, address
        assert ask("GET", f"{prefix}/health").status_code == 200
        if prefix:
            assert ask("GET", prefix).headers["Location"] == f"{prefix}/"


def test_what_nginx_passes_on_and_what_it_keeps_away(tmp_path: Path, web: Site) -> None:
    with through(tmp_path, nginx.documented(), web) as (port, ask):
        large = ask("POST", "/desk/jobs", data=JOB + b" " * 1_048_569, headers={"Content-Type": "application/json"})
        assert (large.status_code, large.json()["type"]) == (413, "/desk/problems/too-large")
        parts = iter([JOB, b" " * 1_048_569])
        large = ask("POST", "/desk/jobs", data=parts, headers={"Content-Type": "application/json"})
        assert (large.status_code, large.json()["type"]) == (413, "/desk/problems/too-large")
        before = web.sql("SELECT count(*) FROM jobs")
        with wire(port) as connection:
            both = b"Content-Length: 8", b"Transfer-Encoding: chunked"
            connection.send(request("POST /desk/jobs", *both, body=CHUNKED_JOB))
            assert connection.answer().status == 400 and connection.is_over()
        assert web.sql("SELECT count(*) FROM jobs") == before


def test_slow_uploads_end_at_nginx_and_hold_up_nobody(tmp_path: Path, web: Site) -> None:
    with through(tmp_path, nginx.documented(), web) as (port, ask), contextlib.ExitStack() as stack:
        slow: list[Wire] = [stack.enter_context(wire(port)) for _ in range(100)]
        for connection in slow:
            connection.send(request("POST /desk/jobs", b"Content-Length: 100000", body=b" " * 50_000))
        for _ in range(10):
            assert ask("POST", "/desk/jobs", json={"n": 5}).status_code == 202
            for connection in slow:
                connection.send(b" ")
        before = web.sql("SELECT count(*) FROM jobs")[0][0]
        for connection in slow:
            connection.send(b" " * (50_000 - 10 - len(JOB)) + JOB)
        assert [connection.answer().status for connection in slow] == [202] * 100
        assert web.sql("SELECT count(*) FROM jobs")[0][0] == before + 100
