"""GET /jobs/<id>: four statuses, from the view or from SQL, and what is left afterwards."""
from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import EnvironBuilder

from app import clock, db, jobs, kinds, redis_client, status
from tasks import prune_expired, run_job
from tests.conftest import World, one_database
from tests.running import a_kind, later, submit

KEYS = {
    "queued": {"job_id", "kind", "status", "attempt", "created_at"},
    "running": {"job_id", "kind", "status", "attempt", "created_at", "started_at"},
    "succeeded": {"job_id", "kind", "status", "attempt", "created_at", "started_at", "finished_at", "expires_at",
                  "result"},
    "failed": {"job_id", "kind", "status", "attempt", "created_at", "started_at", "finished_at", "expires_at", "error"},
}


def check(answer: Any, expected: str) -> None:
    assert answer.status_code == 200
    assert answer.json["status"] == expected
    assert set(answer.json) == KEYS[expected]
    if expected in ("queued", "running"):
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
    else:
        assert "Retry-After" not in answer.headers
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("redis", ["there", "empty", "away"])
def test_four_statuses(api: FlaskClient, world: World, redis: str) -> None:
    """The same answer whether Redis knows the job, has forgotten it, or is not there."""

    def poll(job_id: str) -> Any:
        if redis == "empty":
            world.redis.flushall()
        return api.get(f"/jobs/{job_id}")

    def fail(input: Any, job: kinds.Job) -> None:
        check(poll(job.id), "running")
        raise kinds.Refused("no")

    if redis == "away":
        world.set(REDIS_URL="redis://127.0.0.1:1/0")
        redis_client._client.cache_clear()
    try:
        with a_kind(fail) as kind:
            failing, succeeding = submit(api, kind), submit(api, n=5)
            check(poll(failing), "queued")
            run_job.run_once(failing)
            run_job.run_once(succeeding)
        check(poll(failing), "failed")
        check(poll(succeeding), "succeeded")
    finally:
        redis_client._client.cache_clear()


def test_moments_are_utc_with_milliseconds(api: FlaskClient) -> None:
    moment = api.get(f"/jobs/{submit(api, n=5)}").json["created_at"]
    assert len(moment) == len("2026-11-29T18:40:00.123Z") and moment.endswith("Z")


@pytest.mark.parametrize("job_id", [
    "01a2291c-4328-73fb-86ef-c5a9895026da", "x", "-1", "0", "99999999999999999999", "%00", "..%2fx", "é", "x" * 5000,
    "01A2291C-4328-73FB-86EF-C5A9895026DA", "01a2291c432873fb86efc5a9895026da",
])
def test_an_unknown_id_is_not_found(api: FlaskClient, job_id: str) -> None:
    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/deliveries"):
        answer = api.get(path)
        assert answer.status_code == 404
        assert answer.content_type == "application/problem+json"


@pytest.mark.parametrize("note_id", ["1", "0", "-1", "99999999999999999999", "2147483648", "%00", "x", "01", "１"])
def test_an_unknown_note_is_not_found(api: FlaskClient, note_id: str) -> None:
    for path in (f"/notes/{note_id}", f"/notes/{note_id}/events"):
        answer = api.get(path)
        assert answer.status_code == 404
        assert answer.content_type == "application/problem+json"


def expire(world: World) -> None:
    """Lets the jobs' time to live be over, and Redis forget them as it does by then."""
    with db.transaction() as tx:
        tx.execute(jobs.jobs.update().values(expires_at=clock.now() - timedelta(seconds=1)))
    world.redis.flushall()


def test_an_expired_job_is_gone_before_and_after_it_is_pruned(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    expire(world)
    for pruned in (False, True):
        if pruned:
            assert prune_expired.run_once(clock.now()) == 1
            assert world.count("jobs") == 0
        answer = api.get(f"/jobs/{job_id}")
        assert answer.status_code == 410
        assert answer.json["kind"] == "primes" and answer.json["job_status"] == "succeeded"
        assert answer.json["finished_at"] and answer.json["expired_at"]
        assert "result" not in answer.text and "input" not in answer.json
        assert api.get(f"/jobs/{job_id}/deliveries").status_code == 410
    assert "5" not in str(world.sql("SELECT kind, status FROM tombstones"))


def test_a_tombstone_is_forgotten_after_its_time(api: FlaskClient, world: World) -> None:
    world.set(TOMBSTONE_TTL_SECONDS=100)
    job_id = submit(api, n=5)
    run_job.run_once(job_id)
    expire(world)
    prune_expired.run_once(clock.now())
    assert api.get(f"/jobs/{job_id}").status_code == 410
    prune_expired.run_once(later(200))
    assert api.get(f"/jobs/{job_id}").status_code == 404


def test_unfinished_jobs_are_never_pruned(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    prune_expired.run_once(later(10**9))
    assert api.get(f"/jobs/{job_id}").json["status"] == "queued"


def test_a_job_is_kept_until_its_callback_has_ended(api: FlaskClient, world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    run_job.run_once(submit(api, n=5, callback_url="http://127.0.0.1:9/"))
    expire(world)
    assert prune_expired.run_once(clock.now()) == 0
    world.sql("UPDATE deliveries SET state = 'exhausted', next_attempt_at = NULL")
    assert prune_expired.run_once(clock.now()) == 1
    for table in ("jobs", "deliveries", "delivery_attempts", "outbox"):
        assert world.count(table) == 0


def test_a_key_is_kept_as_long_as_its_job_can_be_read(api: FlaskClient, world: World) -> None:
    world.set(IDEMPOTENCY_TTL_SECONDS=100)
    first = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    prune_expired.run_once(later(200))
    again = api.post("/jobs", json={"n": 5}, headers={"Idempotency-Key": "k"})
    assert again.data == first.data
    run_job.run_once(first.json["job_id"])
    expire(world)
    prune_expired.run_once(clock.now())
    assert world.count("idempotency_keys") == 1  # not yet its own time
    prune_expired.run_once(later(200))
    assert world.count("idempotency_keys") == 0


def test_pruning_goes_through_more_than_one_batch(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    from app import retention

    for _ in range(5):
        run_job.run_once(submit(api, n=1))
    expire(world)
    monkeypatch.setattr(retention, "BATCH", 2)
    monkeypatch.setattr(retention, "_expired", retention._expired.limit(2))
    assert prune_expired.run_once(clock.now()) == 5


# --- the view never goes back ---


def test_a_late_write_never_covers_a_later_state(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    with db.reading() as view:
        queued = jobs.find(view, job_id)
    final = run_job.run_once(job_id)
    assert final is not None and queued is not None
    status.write(queued)
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"


def test_a_stale_hash_of_an_unfinished_job_heals(api: FlaskClient, world: World) -> None:
    """Redis missed the end of a job: what it still shows ends within seconds, and SQL answers."""
    job_id = submit(api, n=5)
    redis_client._away_until = float("inf")
    run_job.run_once(job_id)
    redis_client._away_until = 0.0
    assert 0 < world.redis.pttl(f"job:{job_id}") <= 10_000
    world.redis.delete(f"job:{job_id}")  # as its time to live does
    assert api.get(f"/jobs/{job_id}").json["status"] == "succeeded"
    assert world.redis.hget(f"job:{job_id}", "status") == "succeeded"  # rebuilt


@pytest.mark.parametrize("document", [
    "garbage", "5", "[]", "{}", b"\xff\xfe", '{"job_id": "other", "status": "failed"}'])
def test_a_hash_that_cannot_be_read_is_none(api: FlaskClient, world: World, document: Any) -> None:
    job_id = submit(api, n=5)
    world.redis.hset(f"job:{job_id}", "document", document)
    assert api.get(f"/jobs/{job_id}").json["status"] == "queued"
    world.redis.delete(f"job:{job_id}")
    world.redis.set(f"job:{job_id}", "not a hash")
    assert api.get(f"/jobs/{job_id}").json["status"] == "queued"


def test_every_hash_has_a_time_to_live(api: FlaskClient, world: World) -> None:
    for _ in range(3):
        run_job.run_once(submit(api, n=5))
    submit(api, n=5)
    keys = list(world.redis.scan_iter("job:*"))
    assert len(keys) == 4 and all(world.redis.pttl(key) > 0 for key in keys)


# --- owners ---


def test_what_belongs_to_another_does_not_exist(world: World) -> None:
    from app.api import create_app

    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    client = create_app().test_client()
    ada, bob = ({"Authorization": f"Bearer secret-{name}"} for name in "ab")
    job_id = client.post("/jobs", json={"n": 5}, headers={**ada, "Idempotency-Key": "k"}).json["job_id"]
    client.post("/notes", json={"text": "x"}, headers=ada)
    other = client.post("/jobs", json={"n": 6}, headers={**bob, "Idempotency-Key": "k"})
    assert other.status_code == 202 and other.json["job_id"] != job_id
    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/deliveries", "/notes/1", "/notes/1/events"):
        assert client.get(path, headers=ada).status_code == 200
        assert client.get(path, headers=bob).status_code == 404
    world.redis.flushall()
    assert client.get(f"/jobs/{job_id}", headers=bob).status_code == 404


def test_without_a_token_everything_but_the_open_routes_is_closed(world: World) -> None:
    from app.api import create_app

    world.set(API_TOKENS="ada:secret")
    client = create_app().test_client()
    for path in ("/jobs/x", "/notes/1", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
            assert answer.content_type == "application/problem+json"
    assert client.get("/health").status_code == 200
    assert client.get("/problems/expired").status_code == 200


# --- over the wire ---


@one_database
def test_an_answer_is_handed_to_the_server_as_a_whole(api: FlaskClient, world: World) -> None:
    """It asks for the parts of anything but a list one after the other, and sends the head before the body."""
    job_id = submit(api, n=5)
    for path, json, code in ((f"/jobs/{job_id}", None, 200), ("/jobs", None, 200), ("/jobs", {"n": 5}, 202)):
        environ = EnvironBuilder(path, json=json, method="POST" if json else "GET").get_environ()
        told: list[Any] = []
        parts = api.application.wsgi_app(environ, lambda *given: told.append(given))
        (line, headers), = told
        assert isinstance(parts, list) and len(parts) == 1 and int(line[:3]) == code
        assert [value for name, value in headers if name == "Content-Length"] == [str(len(parts[0]))]
