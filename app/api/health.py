"""`/health`: whether the process lives, and whether everything around it does."""
from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from flask import Blueprint, Response
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from app import clock, config, db, jobs, outbox, presence, redis_client, turns
from app.config import settings

blueprint = Blueprint("health", __name__)

_CONNECT_SECONDS = 1.0  # a broker that swallows everything holds up the answer no longer
_TICKS_MISSED = 5  # of the relay, before it counts as stopped
_UNPUBLISHED_LIMIT_SECONDS = 30.0  # a due row that waits longer: the relay runs and cannot publish

Finding = tuple[bool, str]


@blueprint.get("/health")
def live() -> Response:
    """200 while this process answers."""
    return Response('{"status": "ok"}\n', content_type="application/json")


@blueprint.get("/health/ready")
def ready() -> Response:
    """200 when accepted jobs are being worked off, 503 when some part is missing; a line for each part."""
    findings = {name: _look(check) for name, check in PARTS.items()}
    well = all(ok for ok, _ in findings.values())
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps({'ok': ok, 'detail': detail})}" for name, (ok, detail) in findings.items())
    text = f'{{"status": "{"ready" if well else "not ready"}", "parts": {{\n{lines}\n}}}}\n'
    return Response(text, 200 if well else 503, content_type="application/json")


def _look(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (RedisError, SQLAlchemyError, OSError) as error:
        return False, f"{type(error).__name__}"


def _database() -> Finding:
    return True, db.describe()


def _redis() -> Finding:
    info = redis_client.client().info("server")
    return True, f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info.get('redis_version')}"


def _broker() -> Finding:
    """Whether the broker's port opens. That it works is shown by the relay's age and the workers' signs of life."""
    parts = urlsplit(config.broker_url())
    address = (parts.hostname or "127.0.0.1", parts.port or {"amqp": 5672, "amqps": 5671}.get(parts.scheme, 6379))
    with socket.create_connection(address, timeout=_CONNECT_SECONDS):
        return True, f"{parts.scheme} on {address[0]}:{address[1]}"


def _workers() -> Finding:
    """Whether somebody consumes each queue that has messages."""
    signs = presence.signs_of_life("worker")
    with db.reading() as view:
        waiting = set(outbox.queues_with_published(view)) - {turns.QUEUE}
    if unserved := presence.unserved(waiting):
        return False, f"{_count(signs)}, none for {', '.join(unserved)}"
    return bool(signs), _count(signs)


def _courier() -> Finding:
    signs = presence.signs_of_life("courier")
    return bool(signs), _count(signs)


def _count(signs: list[dict[str, Any]]) -> str:
    return f"{len(signs)} alive, {sum(sign['concurrency'] for sign in signs)} slots"


def _relay() -> Finding:
    ran_at = presence.relay_ran_at()
    if ran_at is None:
        return False, "the relay has never run"
    age = _age(ran_at)
    return age <= max(_TICKS_MISSED * settings().relay_interval_seconds, 5.0), f"the relay ran {age:.1f} s ago"


def _unpublished() -> Finding:
    with db.reading() as view:
        waiting_since, parked = outbox.oldest_unpublished(view), outbox.count_parked(view)
    age = 0.0 if waiting_since is None else max(0.0, _age(waiting_since))
    return age <= _UNPUBLISHED_LIMIT_SECONDS, f"oldest due row {age:.1f} s, {parked} parked"


def _unfinished() -> Finding:
    """Told, not judged: a backlog is no fault."""
    with db.reading() as view:
        since = jobs.oldest_unfinished(view)
    return True, "none" if since is None else f"oldest unfinished job {_age(since):.1f} s"


def _age(moment: datetime) -> float:
    return (clock.now() - moment).total_seconds()


PARTS: dict[str, Callable[[], Finding]] = {
    "database": _database, "redis": _redis, "broker": _broker, "workers": _workers,
    "courier": _courier, "beat": _relay, "unpublished": _unpublished, "unfinished": _unfinished,
}
