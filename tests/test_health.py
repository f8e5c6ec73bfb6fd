"""/health and /health/ready: what is alive, and what waits."""
from __future__ import annotations

from typing import Any

from flask.testing import FlaskClient

from app import clock, presence, redis_client
from tests.conftest import World, one_database
from tests.running import a_kind, later, relay, submit

PARTS = ["database", "redis", "broker", "workers", "courier", "beat", "unpublished", "unfinished"]


def ready(api: FlaskClient) -> tuple[int, dict[str, bool]]:
    answer = api.get("/health/ready")
    return answer.status_code, {name: part["ok"] for name, part in answer.json["parts"].items()}


def everything_lives() -> None:
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 2)
    presence.give_sign_of_life("courier", "c@h", ["relay", "callbacks"], 16)
    presence.relay_ran(clock.now())


def test_health_says_that_the_process_lives(api: FlaskClient) -> None:
    assert api.get("/health").json == {"status": "ok"}


def test_ready_has_a_line_for_each_part(api: FlaskClient, world: World) -> None:
    everything_lives()
    answer = api.get("/health/ready")
    assert answer.status_code == 200 and answer.json["status"] == "ready"
    assert list(answer.json["parts"]) == PARTS
    for name in PARTS:
        assert any(line.startswith(f'  "{name}": ') for line in answer.text.splitlines())


@one_database
def test_a_part_that_is_missing_is_named(api: FlaskClient, world: World) -> None:
    assert ready(api) == (503, {**dict.fromkeys(PARTS, True), "workers": False, "courier": False, "beat": False})
    everything_lives()
    presence.withdraw_sign_of_life("worker", "w@h")
    code, parts = ready(api)
    assert code == 503 and not parts["workers"] and parts["courier"]


@one_database
def test_a_relay_that_stopped_is_noticed(api: FlaskClient, world: World) -> None:
    everything_lives()
    presence.relay_ran(later(-60))
    code, parts = ready(api)
    assert code == 503 and not parts["beat"]
    assert "60" in api.get("/health/ready").json["parts"]["beat"]["detail"]


@one_database
def test_a_queue_without_a_worker_is_named(api: FlaskClient, world: World) -> None:
    everything_lives()
    with a_kind(lambda input, job: None, queue="q:slow") as kind:
        submit(api, kind)
    relay()
    answer = api.get("/health/ready")
    assert answer.status_code == 503 and "none for q:slow" in answer.json["parts"]["workers"]["detail"]


@one_database
def test_rows_that_nobody_publishes_are_noticed(api: FlaskClient, world: World) -> None:
    everything_lives()
    submit(api, n=5)
    assert ready(api)[0] == 200
    world.sql("UPDATE outbox SET available_at = :then", then=str(later(-60).replace(tzinfo=None)))
    code, parts = ready(api)
    assert code == 503 and not parts["unpublished"]


@one_database
def test_redis_away_is_told_without_an_error(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    world.set(REDIS_URL="redis://127.0.0.1:1/0")
    redis_client._client.cache_clear()
    try:
        code, parts = ready(api)
        assert code == 503
        assert {name for name, ok in parts.items() if not ok} == {"redis", "broker", "workers", "courier", "beat"}
    finally:
        redis_client._client.cache_clear()


def test_a_sign_of_life_has_an_end(world: World) -> None:
    everything_lives()
    for key in world.redis.scan_iter("presence:*"):
        assert 0 < world.redis.ttl(key) <= presence.PRESENCE_SECONDS
