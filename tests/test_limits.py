"""How much an owner may ask, how much work is taken, and who may ask at all."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import clock, config, outlook, redis_client
from app.api import create_app, rates
from app.errors import WrongSetting
from tasks import run_job
from tests.asking import all_at_once, another
from tests.conftest import World, one_database
from tests.running import submit

TOKENS = "ada:secret-a, bob:secret-b"
ADA, BOB = ({"Authorization": f"Bearer secret-{name}"} for name in "ab")


def client(world: World, **settings: Any) -> FlaskClient:
    """A client of another process's application: nothing is shared but the database and Redis."""
    world.set(**settings)
    return create_app().test_client()


def check_limited(answer: Any) -> int:
    assert (answer.status_code, answer.content_type) == (429, "application/problem+json")
    assert answer.json["type"] == "/problems/rate-limited"
    assert answer.headers["Retry-After"].isdecimal()
    seconds = int(answer.headers["Retry-After"])
    assert seconds >= 1
    return seconds


# --- RATE_LIMIT ---


@one_database
def test_each_owner_has_a_rate_of_its_own_in_all_processes_together(world: World) -> None:
    one, two = (client(world, API_TOKENS=TOKENS, RATE_LIMIT="6/hour") for _ in range(2))
    for number in range(6):
        assert (one, two)[number % 2].get("/jobs", headers=ADA).status_code == 200
    for each in (one, two):
        assert 1 <= check_limited(each.get("/jobs", headers=ADA)) <= 3600
        assert check_limited(each.post("/jobs", json={"n": 5}, headers={**ADA, "Idempotency-Key": "k"}))
        assert check_limited(each.get("/jobs/x", headers=ADA))
        assert each.get("/jobs", headers=BOB).status_code == 200
    assert (world.count("jobs"), world.count("idempotency_keys")) == (0, 0)
    for each in (one, two):  # what is open stays open, and who may not ask is told so
        for path in ("/health", "/problems/rate-limited"):
            assert each.get(path, headers=ADA).status_code == 200
        assert each.get("/jobs").status_code == 401


@one_database
def test_a_key_that_was_refused_for_the_rate_is_free(world: World) -> None:
    asking = client(world, RATE_LIMIT="1/hour")
    asking.get("/jobs")
    check_limited(asking.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"}))
    world.redis.flushall()
    accepted = asking.post("/jobs", json={"n": 6}, headers={"Idempotency-Key": "k"})
    assert accepted.status_code == 202 and "Idempotent-Replayed" not in accepted.headers


@one_database
def test_an_open_api_has_one_rate_for_all(world: World) -> None:
    asking = client(world, RATE_LIMIT="3/hour")
    codes = [asking.get("/jobs", headers={"X-Forwarded-For": f"192.0.2.{number}"}).status_code for number in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    assert asking.get("/health").status_code == 200


@one_database
@pytest.mark.parametrize("limit", ["1/second", "4/2second", "2/second; 50/minute", "3/second, 7/4second"])
def test_after_what_it_says_a_request_passes(world: World, limit: str) -> None:
    """In whatever part of a window the client asks."""
    asking = client(world, RATE_LIMIT=limit)
    for pause in (0.0, 0.35):
        for _ in range(100):
            if (answer := asking.get("/jobs")).status_code == 429:
                break
        seconds = check_limited(answer)
        threading.Event().wait(seconds + pause)
        assert asking.get("/jobs").status_code == 200


@one_database
def test_every_one_of_several_limits_holds(world: World) -> None:
    asking = client(world, RATE_LIMIT="100/second; 4/hour")
    assert [asking.get("/jobs").status_code for _ in range(6)] == [200] * 4 + [429] * 2
    assert "4 per 1 hour" in asking.get("/jobs").json["detail"]


@one_database
def test_concurrent_requests_are_counted_exactly(world: World) -> None:
    applications = [client(world, RATE_LIMIT="25/hour").application for _ in range(2)]
    codes: list[int] = []

    def ask(number: int) -> None:
        asking = applications[number % 2].test_client()
        for _ in range(10):
            codes.append(asking.get("/jobs").status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(codes) == {200: 25, 429: 55}


@pytest.fixture
def silent() -> Iterator[str]:
    """A Redis that takes connections and never answers: the longest of all its failures."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
    redis_client._client.cache_clear()


@one_database
@pytest.mark.parametrize("how", ["refuses", "silent"])
def test_without_redis_nobody_is_refused_and_nobody_waits_for_long(
    world: World, silent: str, monkeypatch: pytest.MonkeyPatch, how: str,
) -> None:
    asking = client(world, RATE_LIMIT="1/hour", REDIS_URL=silent if how == "silent" else "redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    asked, limiter = [], rates._limiter
    monkeypatch.setattr(rates, "_limiter", lambda pool: asked.append(pool) or limiter(pool))
    monkeypatch.setattr(redis_client, "_PAUSE_SECONDS", 3600.0)
    began = time.monotonic()
    for _ in range(5):
        assert asking.get("/jobs").status_code == 200
        assert asking.post("/jobs", json={"n": 5}).status_code == 202
    assert len(asked) == 1  # then Redis is left alone
    if how == "silent":
        assert time.monotonic() - began >= redis_client._ANSWER_SECONDS  # that one did ask


@one_database
def test_a_redis_that_has_lost_its_scripts_still_counts(world: World) -> None:
    """It was started anew."""
    asking = client(world, RATE_LIMIT="2/hour")
    assert asking.get("/jobs").status_code == 200
    world.redis.script_flush()
    world.redis.flushall()
    assert [asking.get("/jobs").status_code for _ in range(3)] == [200, 200, 429]


@one_database
def test_the_counts_in_redis_end(world: World) -> None:
    asking = client(world, RATE_LIMIT="1/minute", API_TOKENS=TOKENS)
    for _ in range(3):
        asking.get("/jobs", headers=ADA)
    keys = list(world.redis.scan_iter("LIMITS*"))
    assert keys and all(0 < world.redis.pttl(key) <= 120_000 for key in keys)


@pytest.mark.parametrize("name,values", [
    ("RATE_LIMIT", [
        "5", "x", "5/fortnight", "-5/second", "1.5/second", ";", "5/second;", "0/second", "5/second; 0/hour",
        "99999999999/second", "5/99999999999 year", "５/second"]),
    ("MAX_BACKLOG", ["0", "-1", "x", "1.5"]), ("WEB_WAITERS", ["0", "257", "x"]),
])
def test_a_limit_that_is_none_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, values: list[str]) -> None:
    for value in values:
        monkeypatch.setenv(name, value)
        config.settings.cache_clear()
        with pytest.raises(WrongSetting) as raised:
            config.settings()
        line = str(raised.value)
        assert line.startswith(f"{name}={value!r} cannot be used: ") and "\n" not in line
    for value in ("100/second; 2000/minute", "5 per 2 minutes", "1/day"):
        monkeypatch.delenv(name)
        monkeypatch.setenv("RATE_LIMIT", value)
        config.settings.cache_clear()
        assert config.settings().rate_limit == value
        monkeypatch.setenv(name, value)
    config.settings.cache_clear()


# --- MAX_BACKLOG ---


def check_full(answer: Any) -> None:
    assert (answer.status_code, answer.content_type) == (503, "application/problem+json")
    assert answer.json["type"] == "/problems/backlog-full"
    assert answer.headers["Retry-After"].isdecimal() and int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("most", [1, 7])
def test_a_backlog_that_is_full_takes_nothing_until_something_has_ended(world: World, most: int) -> None:
    """Exactly as many as there may be, whatever the outlook was a moment ago; whether they wait or run."""
    asking = client(world, MAX_BACKLOG=most)
    first = asking.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k0"})
    made = [first.json["job_id"]]
    made += [submit(asking, n=number) for number in range(most - 1)]
    for path, body in (("/jobs", {"n": 5}), ("/notes", {"text": "x"})):
        check_full(asking.post(path, json=body, headers={"Idempotency-Key": "k1"}))
    assert [world.count(table) for table in ("jobs", "outbox", "notes", "idempotency_keys")] == [most, most, 0, 1]
    again = asking.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k0"})
    assert (again.status_code, again.data) == (202, first.data) and again.headers["Idempotent-Replayed"] == "true"
    assert asking.post("/jobs", json={"n": 6}, headers={"Idempotency-Key": "k0"}).status_code == 422
    assert asking.post("/jobs", json={"n": -1}).status_code == 422  # what is wrong will not be right later
    held = run_job.claim(made[-1], clock.now())
    assert held is not None
    check_full(asking.post("/jobs", json={"n": 5}))
    run_job.finish(held, run_job.Success("null"), clock.now)
    accepted = asking.post("/notes", json={"text": "x"}, headers={"Idempotency-Key": "k1"})
    assert accepted.status_code == 202 and "Idempotent-Replayed" not in accepted.headers
    check_full(asking.post("/notes", json={"text": "x"}))
    assert asking.post(f"/jobs/{accepted.json['job_id']}/cancel").status_code == 200
    assert asking.post("/jobs", json={"n": 5}).status_code == 202


@one_database
def test_other_requests_go_on_while_the_backlog_is_full(world: World) -> None:
    asking = client(world, MAX_BACKLOG=1)
    job_id = submit(asking, n=5)
    check_full(asking.post("/jobs", json={"n": 5}))
    for path in (f"/jobs/{job_id}", "/jobs", "/notes", f"/jobs/{job_id}/deliveries", "/health"):
        assert asking.get(path).status_code == 200


def test_a_key_that_fills_the_backlog_is_answered_to_all_who_submit_it(world: World) -> None:
    """Whoever comes a moment later finds it full, of this very job."""
    application = client(world, MAX_BACKLOG=1).application
    for number in range(5):
        barrier, answers = threading.Barrier(8), []

        def ask() -> None:
            barrier.wait()
            answers.append(application.test_client().post(
                "/jobs", json={"n": 5}, headers={"Idempotency-Key": f"k{number}"}))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [202] * 8
        assert len({answer.data for answer in answers}) == 1
        run_job.run_once(answers[0].json["job_id"])


def test_concurrent_submissions_are_counted_exactly(world: World) -> None:
    asking = client(world, MAX_BACKLOG=5)
    answers = all_at_once([lambda: another(asking).post("/jobs", json={"n": 5})] * 30)
    assert Counter(answer.status_code for answer in answers) == {202: 5, 503: 25}
    assert world.count("jobs") == 5


@one_database
def test_far_below_the_limit_a_submission_counts_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = client(world)
    counted: list[int] = []
    count = outlook._count_unfinished
    monkeypatch.setattr(outlook, "_count_unfinished", lambda *given: counted.append(1) or count(*given))
    monkeypatch.setattr(outlook, "_FRESH_SECONDS", 3600.0)
    for _ in range(10):
        submit(asking, n=5)
    assert len(counted) == 1


# --- tokens ---


@one_database
def test_only_a_known_token_opens(world: World) -> None:
    asking = client(world, API_TOKENS=TOKENS + ", eve:a.b_c~d+e/f==")
    for header in ("Bearer secret-a", "bearer secret-a", "BEARER  secret-a", "Bearer a.b_c~d+e/f=="):
        assert asking.get("/jobs", headers={"Authorization": header}).status_code == 200
    for header in (
        "", " ", "Bearer", "Bearer ", "Bearer secret", "Bearer secret-a1", "Bearer SECRET-A", "Bearer ada:secret-a",
        "Bearer ada", "Bearer everybody", "secret-a", "Token secret-a", "Basic YWRhOnNlY3JldC1h", "Basic !!!",
        "Digest x", "Bearer secret-a, Bearer secret-b", "Bearer secret-a secret-b", "Bearer a=b", "Bearer =",
        'Bearer "secret-a"', "Bearer \xff\xfe", "Bearer secret-\xe4", "\xff", "Bearer " + "x" * 60_000,
        "Bearer secret-a\x7f", "Bearer a.b_c~d+e/f",
    ):
        for method in ("GET", "POST", "HEAD"):
            answer = asking.open("/jobs", method=method, headers={"Authorization": header})
            assert answer.status_code == 401, header
            assert answer.headers["WWW-Authenticate"].startswith("Bearer realm=")
            assert method == "HEAD" or answer.json["type"] == "/problems/unauthorized"
            assert "secret" not in answer.text
    two = asking.get("/jobs", headers=[("Authorization", "Bearer secret-a"), ("Authorization", "Bearer secret-b")])
    assert two.status_code == 401
    assert world.count("jobs") == 0


@one_database
def test_a_token_is_needed_before_anything_else_is_said(world: World) -> None:
    """Neither what exists nor what a request lacks is told to strangers."""
    asking = client(world, API_TOKENS=TOKENS)
    job_id = asking.post("/jobs", json={"n": 5}, headers=ADA).json["job_id"]
    for method, path in (
        ("GET", "/jobs"), ("POST", "/jobs"), ("GET", f"/jobs/{job_id}"), ("GET", "/jobs/x"), ("DELETE", "/jobs"),
        ("POST", f"/jobs/{job_id}/cancel"), ("GET", f"/jobs/{job_id}/deliveries"), ("GET", "/notes"),
        ("POST", f"/jobs/{job_id}/redeliver"), ("POST", "/notes"), ("GET", "/notes/1"), ("GET", "/notes/1/events"),
        ("GET", "/nowhere"),
    ):
        answer = asking.open(path, method=method, data=b"{", headers={"Prefer": "wait=30"})
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"], path


def test_what_another_owner_has_does_not_exist(world: World, receiver: Any) -> None:
    asking = client(world, API_TOKENS=TOKENS)
    made = asking.post("/notes", json={"text": "x", "callback_url": receiver.url}, headers={
        **ADA, "Idempotency-Key": "k"})
    job_id = made.json["job_id"]
    for finished in (False, True):
        if finished:
            run_job.run_once(job_id)
        for method, path in (
            ("GET", f"/jobs/{job_id}"), ("HEAD", f"/jobs/{job_id}"), ("POST", f"/jobs/{job_id}/cancel"),
            ("GET", f"/jobs/{job_id}/deliveries"), ("POST", f"/jobs/{job_id}/redeliver"), ("GET", "/notes/1"),
            ("GET", "/notes/1/events"),
        ):
            for condition in ({}, {"If-None-Match": "*"}, {"Prefer": "wait=30"}):
                answer = asking.open(path, method=method, headers={**BOB, **condition})
                assert answer.status_code == 404, (method, path)
                assert "ETag" not in answer.headers
    unknown = asking.get("/jobs/01a2291c-4328-73fb-86ef-c5a9895026da", headers=BOB).json
    theirs = asking.get(f"/jobs/{job_id}", headers=BOB).json
    for name in ("instance", "request_id"):
        del unknown[name], theirs[name]
    assert unknown == theirs
    assert asking.get(f"/jobs/{job_id}", headers=ADA).json["status"] == "succeeded"
    assert world.count("deliveries") == 1
    other = asking.post("/notes", json={"text": "y"}, headers={**BOB, "Idempotency-Key": "k"})
    assert other.status_code == 202 and other.json["job_id"] != job_id


@one_database
def test_the_open_api_and_owners_do_not_see_each_other(world: World) -> None:
    """Tokens were set after the first jobs: nobody inherits them."""
    job_id = submit(client(world), n=5)
    closed = client(world, API_TOKENS=TOKENS)
    assert closed.get(f"/jobs/{job_id}", headers=ADA).status_code == 404
    assert closed.get("/jobs", headers=ADA).json == {"jobs": []}


def test_web_does_not_start_open_on_a_public_address(tmp_path: Path) -> None:
    env = {**os.environ, "ENV_FILE": "", "VAR_DIR": str(tmp_path), "HOST": "0.0.0.0", "API_TOKENS": ""}
    ran = subprocess.run([sys.executable, "-m", "app.api"], capture_output=True, text=True, timeout=60, env=env)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("web: ") and "API_TOKENS" in ran.stderr and len(ran.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@one_database
def test_asking_for_the_methods_of_a_route_needs_a_token_too(world: World) -> None:
    asking = client(world, API_TOKENS="ada:secret")
    assert asking.options("/jobs").status_code == 401
    assert asking.options("/jobs", headers={"Authorization": "Bearer secret"}).headers["Allow"]
    assert asking.options("/health").status_code == 200


@one_database
def test_whoever_watches_is_not_limited(world: World) -> None:
    asking = client(world, RATE_LIMIT="1/hour")
    assert [asking.get("/jobs").status_code for _ in range(2)] == [200, 429]
    assert asking.get("/metrics").status_code == 200
