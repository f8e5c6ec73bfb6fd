"""GET /jobs and GET /notes: all that an owner has, newest first, page by page, whatever happens meanwhile."""
from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from flask.testing import FlaskClient
from requests.utils import parse_header_links
from sqlalchemy import insert

from app import clock, db, ids, pages, schema, states
from tasks import deliver_webhook, prune_expired, run_job
from tests import statements
from tests.conftest import World, one_database
from tests.running import submit


def next_of(answer: Any) -> str | None:
    """As a client reads it."""
    links = parse_header_links(answer.headers.get("Link", ""))
    return next((link["url"] for link in links if link.get("rel") == "next"), None)


def follow(client: FlaskClient, address: str, name: str = "jobs", **headers: str) -> Iterator[list[dict[str, Any]]]:
    """Page after page, to the end."""
    ask: str | None = address
    while ask is not None:
        answer = client.get(ask, headers=headers)
        assert answer.status_code == 200 and set(answer.json) == {name}
        assert answer.headers["Cache-Control"] == "no-store"
        yield answer.json[name]
        ask = next_of(answer)
        assert ask is None or (ask.startswith(f"/{name}?") and answer.json[name])


def all_of(client: FlaskClient, address: str, name: str = "jobs", **headers: str) -> list[dict[str, Any]]:
    return [document for page in follow(client, address, name, **headers) for document in page]


def a_row(number: int, state: str, kind: str = "primes", owner: str = "everybody", **more: Any) -> dict[str, Any]:
    """A job of the second `number`; beyond the present ones, so that its place is known."""
    created_at = datetime.fromisoformat("2026-01-01T00:00:00Z") + timedelta(seconds=number)
    final = state in states.FINAL
    return {
        "id": ids.new_id(created_at), "owner": owner, "kind": kind, "queue": "q:jobs2", "status": state,
        "max_attempts": 3, "time_limit_seconds": 300.0, "input": '{"n": 5}', "created_at": created_at,
        "attempt": 0 if state == states.QUEUED else 1, "started_at": None if state == states.QUEUED else created_at,
        "lease_until": clock.now() + timedelta(days=1) if state == states.RUNNING else None,
        "result": '{"n": 5, "count": 3}' if state == states.SUCCEEDED else None,
        "error_code": "exception" if state == states.FAILED else None,
        "error_message": "x" if state == states.FAILED else None,
        "finished_at": created_at if final else None,
        "expires_at": clock.now() + timedelta(days=1) if final else None, **more}


def put(rows: list[dict[str, Any]]) -> None:
    with db.transaction() as tx:
        tx.execute(insert(schema.jobs), rows)


# --- what is in them ---


def test_a_job_is_listed_as_it_is_polled(api: FlaskClient, world: World, receiver: Any) -> None:
    """Every status, with and without a callback, told once and told twice."""
    made = [submit(api, n=5), submit(api, n=5, callback_url=receiver.url), submit(api, n=7), submit(api, n=7)]
    made.append(api.post("/notes", json={"text": "x"}).json["job_id"])
    for job_id in (made[1], made[4]):
        run_job.run_once(job_id)
    deliver_webhook.run_once(world.sql("SELECT id FROM deliveries")[0][0])
    assert api.post(f"/jobs/{made[1]}/redeliver").status_code == 202
    assert run_job.claim(made[2], clock.now()) is not None
    api.post(f"/jobs/{made[3]}/cancel")
    world.redis.flushall()
    listed = {job["job_id"]: job for job in api.get("/jobs").json["jobs"]}
    assert listed == {job_id: api.get(f"/jobs/{job_id}").json for job_id in made}
    assert {job["status"] for job in listed.values()} == set(states.JOB_STATUSES)
    assert listed[made[1]]["callback"]["status"] == "pending"


def test_notes_are_listed_as_they_are_shown(api: FlaskClient) -> None:
    for text in ("a", "受付", "c"):
        api.post("/notes", json={"text": text})
    assert api.get("/notes").json["notes"] == [api.get(f"/notes/{number}").json for number in (3, 2, 1)]


@one_database
def test_nobody_has_anything_at_first(api: FlaskClient) -> None:
    for name in ("jobs", "notes"):
        answer = api.get(f"/{name}")
        assert (answer.status_code, answer.json) == (200, {name: []}) and "Link" not in answer.headers
        assert api.head(f"/{name}").status_code == 200


def test_filters_limits_and_pages_find_exactly_what_there_is(api: FlaskClient, world: World) -> None:
    """Newest first, whatever is asked for; the pages together are the whole."""
    kinds = ("primes", "history", "other-kind")
    rows = [a_row(number, states.JOB_STATUSES[number % 4], kinds[number % 3]) for number in range(50)]
    put(rows)
    for status in (None, *states.JOB_STATUSES):
        for kind in (None, *kinds, "unknown.kind"):
            expected = [row["id"] for row in reversed(rows)
                        if status in (None, row["status"]) and kind in (None, row["kind"])]
            asked = f"status={status or ''}&kind={kind or ''}"
            for limit in (1, 7, 20, 100, None) if status is None or kind is None else (3,):
                found = [[job["job_id"] for job in page]
                         for page in follow(api, f"/jobs?{asked}&cursor=&limit={limit or ''}")]
                assert [job_id for page in found for job_id in page] == expected
                assert all(len(page) == (limit or 20) for page in found[:-1])
                assert len(found[-1]) > 0 or len(found) == 1  # no empty page at the end


@one_database
def test_the_next_link_repeats_what_was_asked(api: FlaskClient) -> None:
    put([a_row(number, states.QUEUED) for number in range(5)])
    link = next_of(api.get("/jobs?kind=primes&limit=2&status=queued&cursor="))
    assert link is not None
    asked = parse_qs(urlsplit(link).query)
    assert asked.keys() == {"kind", "limit", "status", "cursor"}
    assert (asked["kind"], asked["limit"], asked["status"]) == (["primes"], ["2"], ["queued"])
    plain = next_of(api.get("/jobs?limit=2"))
    assert plain is not None and parse_qs(urlsplit(plain).query).keys() == {"limit", "cursor"}
    assert next_of(api.get("/jobs?limit=5")) is None


@one_database
def test_the_next_link_is_not_built_from_the_host_header(api: FlaskClient) -> None:
    put([a_row(number, states.QUEUED) for number in range(5)])
    answer = api.get("/jobs?limit=2", headers={"Host": "evil.example", "X-Forwarded-Prefix": "/evil"})
    assert answer.headers["Link"].startswith("</jobs?")


WRONG = [
    ("limit=0", "#/limit"), ("limit=101", "#/limit"), ("limit=x", "#/limit"), ("limit=-1", "#/limit"),
    ("limit=1.5", "#/limit"), ("limit=%00", "#/limit"), ("limit=" + "9" * 5000, "#/limit"), ("limit=1e1", "#/limit"),
    ("limit=5&limit=5", "#/limit"), ("limit=&limit=5", "#/limit"), ("cursor=x", "#/cursor"), ("cursor=0", "#/cursor"),
    ("cursor=%00", "#/cursor"), ("cursor=%ED%A0%80", "#/cursor"), ("cursor=" + "a" * 5000, "#/cursor"),
    ("cursor=-1", "#/cursor"), ("cursor=99999999999", "#/cursor"), ("unknown=1", "#/unknown"), ("n=5", "#/n"),
    ("Limit=5", "#/Limit"), ("a%2Fb=1", "#/a~1b"), ("a%2Fb=1&a%2Fb=2", "#/a~1b"), ("%00=1", "#/%00"), ("=1", "#/"),
    ("%C3%A9%0D%0A=1&%C3%A9%0D%0A=2", "#/%C3%A9%0D%0A"),
]
WRONG_FOR_JOBS = [
    ("status=done", "#/status"), ("status=QUEUED", "#/status"), ("status=queued%20", "#/status"),
    ("status=queued,running", "#/status"), ("status=queued&status=running", "#/status"), ("status=%00", "#/status"),
    ("kind=%00", "#/kind"), ("kind=%ED%A0%80", "#/kind"), ("kind=" + "a" * 65, "#/kind"), ("kind=primes%0A", "#/kind"),
    ("kind=" + "a" * 50_000, "#/kind"), ("kind=%27%20OR%201=1--", "#/kind"), ("kind=%FF", "#/kind"),
    ("cursor=01A2291C-4328-73FB-86EF-C5A9895026DA", "#/cursor"),
]


@one_database
def test_what_cannot_be_asked_for_is_named(api: FlaskClient) -> None:
    put([a_row(number, states.QUEUED) for number in range(3)])
    asked = [(f"/{name}?{query}", pointer) for query, pointer in WRONG for name in ("jobs", "notes")]
    asked += [(f"/jobs?{query}", pointer) for query, pointer in WRONG_FOR_JOBS]
    asked += [("/notes?status=queued", "#/status"), ("/notes?kind=primes", "#/kind")]
    for address, pointer in asked:
        answer = api.get(address)
        assert (answer.status_code, answer.content_type) == (422, "application/problem+json"), address[:80]
        assert answer.json["type"] == "/problems/invalid-input"
        assert [flaw["pointer"] for flaw in answer.json["errors"]] == [pointer]


@one_database
def test_all_that_is_wrong_is_named_at_once(api: FlaskClient) -> None:
    answer = api.get("/jobs?limit=0&status=x&cursor=y&z=1")
    assert {flaw["pointer"] for flaw in answer.json["errors"]} == {"#/limit", "#/status", "#/cursor", "#/z"}


# --- while things happen ---


def at_once(*works: Callable[[], None]) -> None:
    """Runs all of these at one time; what one of them raises is raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def test_no_page_misses_or_repeats_anything_while_jobs_come_and_end(world: World) -> None:
    from app.api import create_app

    application = create_app()
    client = application.test_client()
    first = [submit(client, n=5) for _ in range(40)]
    notes = [client.post("/notes", json={"text": "x"}).json["id"] for _ in range(20)]
    over = threading.Event()

    def come() -> None:
        other = application.test_client()
        while not over.is_set():
            submit(other, n=6)
            other.post("/notes", json={"text": "later"})

    def end() -> None:
        for job_id in first * 3:
            if over.is_set():
                return
            run_job.run_once(job_id)

    def read() -> None:
        try:
            for _ in range(3):
                found = [job["job_id"] for job in all_of(application.test_client(), "/jobs?limit=7")]
                assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
                assert set(first) <= set(found)
                listed = [note["id"] for note in all_of(application.test_client(), "/notes?limit=3", "notes")]
                assert listed == sorted(listed, reverse=True) and len(set(listed)) == len(listed)
                assert set(notes) <= set(listed)
        finally:
            over.set()

    at_once(come, end, read)
    assert world.count("jobs") > 60 and world.count("jobs", "status = 'succeeded'") > 0


def test_a_page_goes_on_although_its_last_job_is_gone(api: FlaskClient, world: World) -> None:
    rows = [a_row(number, states.SUCCEEDED) for number in range(9)]
    put(rows)
    pages_read = follow(api, "/jobs?limit=3")
    assert [job["job_id"] for job in next(pages_read)] == [row["id"] for row in rows[:5:-1]]
    world.sql("DELETE FROM jobs WHERE id >= :id", id=rows[5]["id"])
    assert [job["job_id"] for page in pages_read for job in page] == [row["id"] for row in rows[4::-1]]


def test_expired_jobs_are_not_listed_before_and_after_they_are_pruned(api: FlaskClient, world: World) -> None:
    over = clock.now() - timedelta(seconds=1)
    rows = [a_row(number, states.SUCCEEDED, **({"expires_at": over} if number % 2 else {})) for number in range(20)]
    put(rows)
    expected = [row["id"] for row in reversed(rows[::2])]
    assert [job["job_id"] for job in all_of(api, "/jobs?limit=3")] == expected
    assert prune_expired.run_once(clock.now()) == 10
    assert [job["job_id"] for job in all_of(api, "/jobs?limit=3")] == expected


def test_another_owners_things_are_never_listed(world: World) -> None:
    from app.api import create_app

    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    client = create_app().test_client()
    tokens = {name: {"Authorization": f"Bearer secret-{name[0]}"} for name in ("ada", "bob")}
    put([a_row(number, states.QUEUED, owner=("ada", "bob", "everybody")[number % 3]) for number in range(30)])
    cursor = world.sql("SELECT max(id) FROM jobs WHERE owner = 'everybody'")[0][0]
    for name, token in tokens.items():
        client.post("/notes", json={"text": name}, headers=token)
        mine = {row[0] for row in world.sql("SELECT id FROM jobs WHERE owner = :owner", owner=name)}
        assert len(mine) == 11
        assert {job["job_id"] for job in all_of(client, "/jobs?limit=4", **token)} == mine
        assert {job["job_id"] for job in all_of(client, f"/jobs?cursor={cursor}", **token)} < mine  # a stranger's id
        assert [note["text"] for note in all_of(client, "/notes", "notes", **token)] == [name]
    assert client.get("/jobs").status_code == client.get("/notes").status_code == 401


# --- what they cost ---


def test_large_results_make_short_pages_and_none_is_lost(
    api: FlaskClient, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "RESULT_BYTES", 1000)
    sizes = [10, 400, 400, 400, 5000, 5000, 10, 990, 10, 10, 330, 330, 330, 330]
    texts = [("é" * (size // 2)) for size in sizes]
    rows = [a_row(number, states.SUCCEEDED, result=json.dumps(text, ensure_ascii=False))
            for number, text in enumerate(texts)]
    put(rows)
    found = list(follow(api, "/jobs?limit=5"))
    assert [job["result"] for page in found for job in page] == texts[::-1]
    for page in found:
        sizes_of_page = [len(job["result"].encode()) + 2 for job in page]
        assert len(page) == 1 or sum(sizes_of_page) <= 1000
    assert [len(page) for page in found] == [3, 3, 1, 1, 1, 1, 2, 2]


@one_database
def test_pages_of_the_largest_results_stay_small(api: FlaskClient) -> None:
    result = json.dumps("x" * (256 * 1024 - 2))
    put([a_row(number, states.SUCCEEDED, result=result) for number in range(12)])
    found = list(follow(api, "/jobs?limit=100"))
    assert [len(page) for page in found] == [4, 4, 4]


def test_inputs_stay_in_the_database(api: FlaskClient) -> None:
    put([a_row(1, states.QUEUED)])
    with statements.made_here() as made:
        api.get("/jobs")
    assert made and not any("jobs.input" in statement for statement, _ in made)


def test_every_list_is_read_along_an_index(api: FlaskClient, world: World) -> None:
    """No table is read from end to end, and nothing is sorted but a few rows."""
    put([a_row(number, states.JOB_STATUSES[number % 4 if number % 50 == 0 else 2], ("primes", "history")[number % 2],
               f"owner-{number % 3}") for number in range(4000)])
    world.sql("INSERT INTO notes (owner, text, created_at) "
              "SELECT owner, 'x', created_at FROM jobs")
    cursor = world.sql("SELECT max(id) FROM jobs WHERE created_at < '2026-01-01 00:40:00'")[0][0]
    for analyzed in (False, True):
        if analyzed:
            world.sql("ANALYZE")
        with statements.made_here() as made, db.reading() as view:
            for status in (None, "queued", "succeeded"):
                for kind in (None, "primes", "unknown"):
                    for start in (None, cursor):
                        pages.jobs_of(view, "owner-1", clock.now(), 20, status, kind, start)
            for number in (None, 2000):
                pages.notes_of(view, "owner-1", 20, number)
        asked = [(statement, values) for statement, values in made if statement.startswith("SELECT")]
        assert len(asked) == 20
        for statement, values in asked:
            plan = explain(world, statement, values)
            if world.dialect == "sqlite":
                assert "SEARCH" in plan and "SCAN" not in plan and "TEMP B-TREE" not in plan, plan
            elif analyzed:  # before that it knows nothing of the tables
                assert "Index" in plan and "Seq Scan" not in plan, plan


def explain(world: World, statement: str, values: Any) -> str:
    prefix = "EXPLAIN QUERY PLAN" if world.dialect == "sqlite" else "EXPLAIN"
    with db.reading() as view:
        return "\n".join(str(tuple(row)[-1]) for row in view.exec_driver_sql(f"{prefix} {statement}", values))


@one_database
def test_odd_addresses_are_no_lists(api: FlaskClient) -> None:
    for name in ("jobs", "notes"):
        assert api.get(f"/{name}/").status_code == 200
        for path in (f"/{name}//", f"/{name}/%20", f"/{name}/{quote('?limit=1')}"):
            assert api.get(path).status_code == 404


def test_the_callbacks_of_a_page_are_read_with_one_statement(api: FlaskClient, world: World, receiver: Any) -> None:
    for _ in range(5):
        run_job.run_once(submit(api, n=5, callback_url=receiver.url))
    with statements.made_here() as made:
        assert len(api.get("/jobs").json["jobs"]) == 5
    assert sum(statement.startswith("SELECT") for statement, _ in made) == 2
