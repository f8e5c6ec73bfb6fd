"""POST /jobs and POST /notes: what a 202 means."""
from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter

import pytest
from flask.testing import FlaskClient

from app import clock, db, ids, kinds, submissions
from tests.conftest import World
from tests.running import a_kind, kind


def test_a_job_is_accepted_with_its_address(api: FlaskClient, world: World) -> None:
    answer = api.post("/jobs", json={"n": 5})
    assert answer.status_code == 202
    assert set(answer.json) == {"job_id", "status"}
    assert answer.json["status"] == "queued"
    assert ids.is_id(answer.json["job_id"])
    assert answer.headers["Location"] == f"/jobs/{answer.json['job_id']}"
    assert answer.headers["Retry-After"].isdigit()
    assert answer.headers["Cache-Control"] == "no-store"


def test_the_location_is_not_built_from_the_host_header(api: FlaskClient) -> None:
    answer = api.post("/jobs", json={"n": 5}, headers={"Host": "evil.example", "X-Forwarded-Host": "evil2.example"})
    assert answer.headers["Location"].startswith("/jobs/")


def test_a_submission_writes_job_and_outbox_row_and_nothing_else_happens(api: FlaskClient, world: World) -> None:
    job_id = api.post("/jobs", json={"n": 5}).json["job_id"]
    assert world.sql("SELECT id, status, attempt, result FROM jobs") == [(job_id, "queued", 0, None)]
    assert world.sql("SELECT task, target_id, state, queue FROM outbox") == [
        ("run_job", job_id, "waiting", "q:jobs2")]
    assert not world.redis.exists("q:jobs2")


def test_a_submission_shows_its_hash_with_a_time_to_live(api: FlaskClient, world: World) -> None:
    job_id = api.post("/jobs", json={"n": 5}).json["job_id"]
    shown = world.redis.hgetall(f"job:{job_id}")
    assert shown["status"] == "queued" and shown["kind"] == "primes"
    assert 0 < world.redis.pttl(f"job:{job_id}") <= 10_000


def test_a_note_is_accepted_with_its_job(api: FlaskClient, world: World) -> None:
    answer = api.post("/notes", json={"text": "é\u2028"})
    job_id = answer.json["job_id"]
    assert answer.status_code == 202
    assert answer.json == {"id": 1, "text": "é\u2028", "job_id": job_id, "status_url": f"/jobs/{job_id}"}
    assert answer.headers["Location"] == f"/jobs/{job_id}"
    assert answer.headers["Link"] == '</notes/1>; rel="related"'
    assert api.get("/notes/1").json.keys() == {"id", "text", "created_at"}
    assert api.get("/notes/1/events").json == {"events": []}
    assert api.get(f"/jobs/{job_id}").json["note_id"] == 1


def test_the_broker_is_unknown_to_the_api() -> None:
    program = "import sys, app.api; app.api.create_app(); print([m for m in sys.modules if m in ('celery', 'kombu')])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_submission_is_accepted_while_redis_is_away(api: FlaskClient, world: World) -> None:
    from app import redis_client

    world.set(REDIS_URL="redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    try:
        job_id = api.post("/jobs", json={"n": 5}).json["job_id"]
        assert api.get(f"/jobs/{job_id}").json["status"] == "queued"
    finally:
        redis_client._client.cache_clear()
    assert world.count("outbox", "state = 'waiting'") == 1


# --- the same key twice ---


def test_a_repeated_key_gets_the_first_answer_byte_for_byte(api: FlaskClient, world: World) -> None:
    first = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    again = api.post("/jobs", data='{ "kind": "primes",  "n": 5.0e0 }'.replace("5.0e0", "5"),
                     content_type="application/json", headers={"Idempotency-Key": '"k"'})
    assert again.status_code == 202
    assert again.data == first.data and again.headers["Location"] == first.headers["Location"]
    assert again.headers["Idempotent-Replayed"] == "true" and "Idempotent-Replayed" not in first.headers
    assert (world.count("jobs"), world.count("outbox")) == (1, 1)


def test_a_repeated_key_of_a_note_keeps_one_note(api: FlaskClient, world: World) -> None:
    first, again = (api.post("/notes", json={"text": "x"}, headers={"Idempotency-Key": "k"}) for _ in range(2))
    assert again.data == first.data and again.headers["Link"] == first.headers["Link"]
    assert world.count("notes") == 1


@pytest.mark.parametrize("other", [
    {"path": "/jobs", "json": {"n": 6}}, {"path": "/notes", "json": {"text": "x"}},
])
def test_a_key_stands_for_one_request(api: FlaskClient, world: World, other: dict) -> None:
    first = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    answer = api.post(headers={"Idempotency-Key": "k"}, **other)
    assert answer.status_code == 422
    assert answer.json["type"] == "/problems/key-reused"
    assert answer.json["location"] == first.headers["Location"]
    assert (world.count("jobs"), world.count("notes")) == (1, 0)


def test_a_repetition_is_answered_even_if_it_would_be_refused_now(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    body = {"n": 5, "callback_url": "http://127.0.0.1:9/"}
    first = api.post("/jobs", json=body, headers={"Idempotency-Key": "k"})
    world.set(CALLBACK_ALLOW="")
    assert api.post("/jobs", json=body, headers={"Idempotency-Key": "k"}).data == first.data
    assert api.post("/jobs", json=body).status_code == 422


def test_a_refused_request_leaves_its_key_free(api: FlaskClient, world: World) -> None:
    assert api.post("/jobs", json={"n": -1}, headers={"Idempotency-Key": "k"}).status_code == 422
    assert world.count("idempotency_keys") == 0
    assert api.post("/jobs", json={"n": 1}, headers={"Idempotency-Key": "k"}).status_code == 202


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "é", "a\tb", '"open', '""', '"a\\b"', '"' + "x" * 256 + '"'])
def test_a_key_that_cannot_be_one_is_refused(api: FlaskClient, world: World, key: str) -> None:
    answer = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": key.encode().decode("latin-1")})
    assert answer.status_code == 400
    assert answer.json["type"] == "/problems/bad-idempotency-key"
    assert world.count("jobs") == 0


@pytest.mark.parametrize("path,body", [("/jobs", {"n": 5}), ("/notes", {"text": "x"})])
def test_concurrent_submissions_of_one_key_make_one_job(world: World, path: str, body: dict) -> None:
    from app.api import create_app

    app, barrier, answers = create_app(), threading.Barrier(16), []

    def submit() -> None:
        barrier.wait()
        answer = app.test_client().post(path, json=body, headers={"Idempotency-Key": "k"})
        answers.append((answer.status_code, answer.headers["Location"], answer.data))

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 16 and Counter(answer[0] for answer in answers) == {202: 16}
    assert len(set(answers)) == 1
    assert (world.count("jobs"), world.count("outbox"), world.count("idempotency_keys")) == (1, 1, 1)
    assert world.count("notes") == (1 if path == "/notes" else 0)


# --- failures before the commit ---


def refuse_writing(world: World, table: str, when: str = "INSERT", condition: str = "") -> str:
    """As a person would: a trigger. Returns the statement that drops it."""
    if world.dialect == "sqlite":
        when_clause = f"WHEN {condition}" if condition else ""
        world.sql(f"CREATE TRIGGER injected BEFORE {when} ON {table} {when_clause} "
                  "BEGIN SELECT RAISE(ABORT, 'injected failure'); END")
        return "DROP TRIGGER injected"
    world.sql("CREATE OR REPLACE FUNCTION injected() RETURNS trigger LANGUAGE plpgsql AS "
              "$$ BEGIN RAISE EXCEPTION 'injected failure'; END $$")
    when_clause = f"WHEN ({condition})" if condition else ""
    world.sql(f"CREATE TRIGGER injected BEFORE {when} ON {table} FOR EACH ROW {when_clause} "
              "EXECUTE FUNCTION injected()")
    return f"DROP TRIGGER injected ON {table}"


@pytest.mark.parametrize("table", ["jobs", "outbox", "idempotency_keys"])
def test_a_note_whose_job_cannot_be_written_is_not_kept(api: FlaskClient, world: World, table: str) -> None:
    drop = refuse_writing(world, table)
    answer = api.post("/notes", json={"text": "x"}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 500
    assert answer.content_type == "application/problem+json"
    assert "injected" not in answer.text
    for name in ("notes", "jobs", "outbox", "idempotency_keys"):
        assert world.count(name) == 0
    world.sql(drop)
    assert api.post("/notes", json={"text": "x"}, headers={"Idempotency-Key": "k"}).status_code == 202


def test_history_is_submitted_by_notes_only(api: FlaskClient) -> None:
    answer = api.post("/jobs", json={"kind": "history", "note_id": 1})
    assert answer.status_code == 422
    assert answer.json["errors"] == [{"pointer": "#/kind", "detail": "must be one of primes"}]
    assert "history" in kinds.registry()


def test_answers_are_json_in_utf8(api: FlaskClient) -> None:
    answer = api.post("/notes", json={"text": "受付"})
    assert json.loads(answer.data.decode("utf-8"))["text"] == "受付"


def test_kinds_of_all_limits_share_a_transaction(world: World) -> None:
    with a_kind(lambda input, job: None, time_limit=60) as one, a_kind(lambda input, job: None, time_limit=60.5) as two:
        together = [submissions._Submission("ada", kind(name), {}, None, None, clock.now()) for name in (one, two)]
        with db.transaction() as tx:
            submissions._write(tx, together)
    assert world.sql("SELECT time_limit_seconds FROM jobs ORDER BY 1") == [(60.0,), (60.5,)]
