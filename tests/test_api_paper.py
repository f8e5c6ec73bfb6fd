"""docs/api.md: its lines and its clients do what it says, run as they stand; what it names is there, and the other way
round."""
from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import redis
import requests

from app import clock, ports, states
from app.api import models, problems
from tests import paper
from tests import receiver as receivers
from tests.processes import Process, Site
from tests.servers import Valkey, wait_until

pytestmark = pytest.mark.acceptance

Desk = tuple[Site, list[Process], list[str]]  # its `web` is the last of the processes; what its lines said


@pytest.fixture(scope="module")
def desk(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A whole site, on which the paper's lines have been run."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    with Site(tmp_path_factory.mktemp("desk"), REDIS_URL=valkey.url, JOB_MODULES="tests.slow_kinds", TRUSTED_PROXIES=1,
              CALLBACK_ALLOW="127.0.0.1/32") as site:
        site.start("worker", "courier", "beat", "hooksink")
        web = site.start_alone("web")
        site.wait_ready()
        wait_until(lambda: not ports.is_free("127.0.0.1", site.hook_port), what="hooksink listens")
        yield site, [web], list(run_lines(site))


def run_lines(site: Site) -> Iterator[str]:
    """What the first line says that does not say what stands below it."""
    known: dict[str, str] = {}
    for line, expected in paper.lines():
        command = here(site, line)
        for there, ours in known.items():
            command = command.replace(there, ours)

        def says_it() -> bool:
            ran = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
            said.append(ran.stdout)
            return paper.masked(ran.stdout) == paper.masked(expected)

        said: list[str] = []
        if not says_it() and not ("-d" in line or "-X" not in line and reaches(says_it)):
            yield f"{line}\n{said[-1]}\ninstead of\n{expected}"
            return
        for pattern in (paper.UUID, paper.ETAG):
            known |= dict(zip(re.findall(pattern, expected), re.findall(pattern, said[-1])))


def reaches(says_it: Callable[[], bool]) -> bool:
    """Whether it says so later."""
    try:
        return bool(wait_until(says_it, 20))
    except AssertionError:
        return False


def here(site: Site, text: str) -> str:
    """The paper's addresses as this site has them."""
    return text.replace("127.0.0.1:8140", f"127.0.0.1:{site.port}").replace(
        "127.0.0.1:8141", f"127.0.0.1:{site.hook_port}")


@pytest.fixture(scope="module")
def narrow(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A `web` by itself that takes one job at a time, of whoever has a token, and keeps it for a second."""
    with Site(tmp_path_factory.mktemp("narrow"), REDIS_URL=valkey.url.replace("/0", "/1"), API_TOKENS="ada:secret",
              MAX_BACKLOG=1, RATE_LIMIT="30/day", RESULT_TTL_SECONDS=1) as site:
        site.session.headers["Authorization"] = "Bearer secret"
        site.start_alone("web")
        site.wait_answering()
        yield site


def test_the_lines_do_what_they_say(desk: Desk) -> None:
    assert len(paper.lines()) >= 10 and not desk[2], "\n\n".join(desk[2])


# --- the client ---


def test_the_client_as_it_stands_prints_the_result(desk: Desk, tmp_path: Path) -> None:
    site = desk[0]
    program = tmp_path / "client.py"
    program.write_text(here(site, paper.blocks("python")[0]))
    ran = subprocess.run([sys.executable, program], env=site.env, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("{'n': 100000, 'count': 9592}\n", "")


def shell(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    argv = ["/bin/sh", "-uc", program]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_shells_client_as_it_stands_prints_the_job(desk: Desk, tmp_path: Path) -> None:
    ran = shell(tmp_path, here(desk[0], paper.blocks("sh")[0]))
    assert json.loads(ran.stdout)["result"] == {"n": 100000, "count": 9592}
    assert (ran.stderr, ran.returncode) == ("", 0)


def test_the_shells_client_finds_its_job_behind_a_prefix(desk: Desk, tmp_path: Path) -> None:
    """And after an answer that was lost."""
    program = paper.blocks("sh")[0].replace("invoice-4712", "prefix").replace("100000", "4002")
    with paper.relay(desk[0].api, "/desk", lambda forward: None) as api:
        ran = shell(tmp_path, program.replace("http://127.0.0.1:8140", api))
    assert json.loads(ran.stdout)["result"]["n"] == 4002 and ran.returncode == 0


@pytest.mark.parametrize(("key", "n", "problem"), [
    ("another", "7", "key-reused"), ("none", '"abc"', "invalid-input")])
def test_the_shells_client_prints_the_problem_of_a_refused_request(
        desk: Desk, tmp_path: Path, key: str, n: str, problem: str) -> None:
    desk[0].post("/jobs", {"n": 8}, Idempotency_Key="another")
    program = here(desk[0], paper.blocks("sh")[0]).replace("invoice-4712", key).replace("100000", n)
    ran = shell(tmp_path, program)
    assert json.loads(ran.stdout)["type"] == f"/problems/{problem}"
    assert (ran.stderr, ran.returncode) == ("", 1)


def test_the_client_asks_no_more_often_than_it_is_told(desk: Desk) -> None:
    client = paper.Client(meanwhile=time.sleep)
    assert client.result_of(f"{desk[0].api}/jobs", {"kind": "nap", "seconds": 2.5}, "nap") == {"attempt": 1}
    assert client.waits[0] >= 1 and client.waits[-1] == 0 and len(client.waits) >= 3
    assert client.was_polite(), client.log


def test_the_client_says_why_a_job_failed(desk: Desk) -> None:
    client = paper.Client(meanwhile=time.sleep)
    with pytest.raises(ValueError, match='"exception", "message": "MemoryError'):
        client.result_of(f"{desk[0].api}/jobs", {"kind": "glutton"}, "glutton")


@pytest.mark.parametrize(("key", "n", "problem"), [("another", 7, "key-reused"), ("none", -1, "#/n")])
def test_the_client_asks_once_what_is_refused(desk: Desk, key: str, n: int, problem: str) -> None:
    desk[0].post("/jobs", {"n": 8}, Idempotency_Key="another")
    client = paper.Client(meanwhile=lambda _: None)
    with pytest.raises(ValueError, match=problem):
        client.result_of(f"{desk[0].api}/jobs", {"n": n}, key)
    assert client.log == [("POST", 422)]


def test_the_client_asks_again_what_a_proxy_answers_and_goes_nowhere_else() -> None:
    def cut(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(202)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.close_connection = True

    moved = receivers.status(301, Location="/elsewhere")
    answers = [cut, receivers.status(429), receivers.status(502), moved]
    client = paper.Client(meanwhile=lambda _: None)
    with receivers.receiver() as told:
        told.respond = lambda handler, count: answers[count - 1](handler, count)
        with pytest.raises(ValueError):
            client.result_of(f"{told.url}/jobs", {"n": 1}, "moved")
    assert client.log == [
        ("POST", 0), ("pause", 2), ("POST", 429), ("pause", 2), ("POST", 502), ("pause", 2), ("POST", 301)]
    assert {(hook.path, hook.headers["idempotency-key"], hook.body) for hook in told.hooks} == {
        ("/jobs", "moved", b'{"n": 1}')}


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_that_dies_before_its_answer_makes_one_job(desk: Desk, kept: bool) -> None:
    """kill -9 between the client's POST and the answer, before and after the commit; through a proxy with a prefix."""
    site, webs, _ = desk

    def lose(forward: Callable[[], Any]) -> None:
        assert not kept or forward().status_code == 202
        webs[-1].kill()
        webs.append(site.start_alone("web"))

    n, key = 4000 + kept, f"killed-{kept}"
    client = paper.Client(meanwhile=lambda _: site.wait_answering())
    with paper.relay(site.api, "/desk", lose) as api:
        assert client.result_of(f"{api}/jobs", {"n": n}, key)["n"] == n
    assert client.log[0] == ("POST", 0) and ("POST", 202) in client.log
    assert site.sql(f"SELECT count(*) FROM jobs WHERE input LIKE '%{n}%'") == [(1,)]
    assert site.sql(f"SELECT count(*) FROM idempotency_keys WHERE key = '{key}'") == [(1,)]


def a_client_of(site: Site, meanwhile: Callable[[int], Any]) -> paper.Client:
    """With a token, and a day that has just begun."""
    forget_rates(site)
    client = paper.Client(meanwhile)
    client.session.headers["Authorization"] = "Bearer secret"
    return client


def forget_rates(site: Site) -> None:
    with redis.Redis.from_url(site.env["REDIS_URL"]) as server:
        server.flushdb()


def cancel_all(site: Site) -> None:
    forget_rates(site)
    for job in site.get("/jobs?status=queued").json()["jobs"]:
        cancel(site, job["job_id"])


def cancel(site: Site, job_id: str) -> requests.Response:
    return site.session.post(f"{site.api}/jobs/{job_id}/cancel", timeout=30)


def test_the_client_comes_back_when_there_is_less_to_do(narrow: Site) -> None:
    narrow.submit(n=1)
    client = a_client_of(narrow, lambda _: cancel_all(narrow))
    with pytest.raises((ValueError, LookupError)):  # cancelled, or expired since
        client.result_of(f"{narrow.api}/jobs", {"n": 2}, "busy")
    assert client.log[:3] == [("POST", 503), ("pause", 30), ("POST", 202)] and client.was_polite()
    assert narrow.sql("SELECT count(*) FROM jobs WHERE input LIKE '%2%'") == [(1,)]


def test_the_client_comes_back_when_it_may_ask_again(narrow: Site) -> None:
    client = a_client_of(narrow, lambda _: cancel_all(narrow))
    while narrow.get("/jobs").status_code != 429:
        pass
    with pytest.raises((ValueError, LookupError)):
        client.result_of(f"{narrow.api}/jobs", {"n": 3}, "often")
    assert client.asked()[:2] == [("POST", 429), ("POST", 202)]
    assert client.waits[0] >= 1 and client.was_polite()


def test_both_clients_know_a_job_that_has_expired(narrow: Site, tmp_path: Path) -> None:
    client = a_client_of(narrow, lambda _: None)
    location = narrow.post("/jobs", {"n": 4}, Idempotency_Key="late").headers["Location"]
    ended = cancel(narrow, location.split("/")[-1]).json()
    wait_until(lambda: clock.now() > datetime.fromisoformat(ended["expires_at"]))
    with pytest.raises(LookupError, match="no longer kept"):
        client.result_of(f"{narrow.api}/jobs", {"n": 4}, "late")
    assert client.asked() == [("POST", 202), ("GET", 410)]
    program = here(narrow, paper.blocks("sh")[0]).replace("invoice-4712", "late").replace("100000", "4")
    ran = shell(tmp_path, program.replace("curl ", "curl -H 'Authorization: Bearer secret' "))
    assert ran.returncode == 1
    assert {paper.masked(ran.stdout), paper.masked(narrow.get(location).text)} <= set(
        map(paper.masked, paper.blocks("json")))


# --- what it names ---


def test_the_tables_hold_every_word_and_no_other() -> None:
    assert list(paper.table("`status`")) == list(states.JOB_STATUSES)
    assert list(paper.table("`error.code`")) == list(states.ERROR_CODES)
    assert list(paper.table("`callback.status`")) == list(states.DELIVERY_STATES)
    told = {name: row[0] for name, row in paper.table("type `/problems/...`").items()}
    assert told == {name: str(entry.status) for name, entry in problems.TABLE.items()}


def test_its_references_lead_to_a_heading() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"(?m)^##+ (.*)$", paper.TEXT)}
    assert set(re.findall(r"\]\(#([^)]+)\)", paper.TEXT)) <= headings


def members(value: Any) -> set[str]:
    """Every name in a document."""
    if isinstance(value, list):
        return set().union(*map(members, value))
    return set(value).union(*map(members, value.values())) if isinstance(value, dict) else set()


def with_progress(answer: requests.Response) -> requests.Response | None:
    return answer if "progress" in answer.json() else None


def test_every_header_and_member_that_it_names_exists(desk: Desk, narrow: Site) -> None:
    site = desk[0]
    answers: list[requests.Response] = []

    def take(answer: requests.Response) -> Any:
        answers.append(answer)
        return answer.json() if answer.content else None

    with receivers.receiver() as told:
        job_id = take(site.post("/jobs", {"n": 10**9, "callback_url": told.url}, Idempotency_Key="k"))["job_id"]
        running = wait_until(lambda: with_progress(site.get(f"/jobs/{job_id}")))
        take(site.get(f"/jobs/{job_id}", headers={"If-None-Match": running.headers["ETag"]}))
        assert answers[-1].status_code in (200, 304) and "Retry-After" in answers[-1].headers
        take(site.session.post(f"{site.api}/jobs/{job_id}/redeliver"))
        take(cancel(site, job_id))
        wait_until(lambda: site.get(f"/jobs/{job_id}").json()["callback"]["status"] == "delivered")
        hook = told.hooks[0]
    take(site.post("/jobs", {"n": 10**9, "callback_url": told.url}, Idempotency_Key="k"))
    refused = site.submit(n=5, callback_url=f"{site.hook}/status/503")
    wait_until(lambda: "last_response" in site.get(f"/jobs/{refused}").json()["callback"])
    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/deliveries", "/jobs?limit=1", "/notes/1/events"):
        take(site.get(path, headers={"Prefer": "wait=1"}))
    note = take(site.post("/notes", {"text": "x"}))
    shown = [running.json(), site.poll(note["job_id"]), site.poll(job_id), site.poll(refused)]
    take(site.post("/jobs", {"n": 1}, Idempotency_Key="k"))
    take(site.post("/jobs", {"n": -1}))
    take(site.session.put(f"{site.api}/jobs"))
    take(requests.get(f"{narrow.api}/jobs", headers={"Authorization": "Bearer wrong"}, timeout=30))
    assert members(paper.table("member")) == set().union(*shown)

    sent = {"Authorization", "Content-Type", "Idempotency-Key", "If-None-Match", "Prefer"}
    known = {name.lower() for name in sent.union(*(answer.headers for answer in answers), hook.headers)}
    header = r"[A-Z][a-zA-Z]*[a-z][a-zA-Z]*(?:-[A-Z][a-zA-Z]*)*|webhook-[a-z]+"
    named = set(re.findall(rf"`({header})(?:: [^`]*)?`", paper.TEXT))
    assert len(named) > 15 and {name for name in named if name.lower() not in known} == set()

    documents = [*shown, json.loads(hook.body), *(answer.json() for answer in answers if answer.content)]
    expired = json.loads(paper.blocks("json")[1])  # compared with a real one above
    words = {"callback_url", "text", "n", "limit", "cursor", *models.Endpoint.model_fields}
    words |= members(expired) | members(documents)
    values = {*states.JOB_STATUSES, *states.ERROR_CODES, *states.DELIVERY_STATES, *states.STANDINGS, *problems.TABLE,
              "created", "primes"}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", paper.TEXT))
    assert len(named) > 40 and named - words - values == {"urljoin", "k"}
