"""Signs of life in Redis: which workers and couriers are alive and consuming, and when the relay last ran."""
from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from app.redis_client import away, best_effort, client

PRESENCE_SECONDS = 15  # how long a sign of life counts; workers give one every 2 s; seven in a row may be late
FRESH_SECONDS = 6  # three signs: a worker that was killed counts no longer than that as one that is free
_RESCUE_KEY = "rescue:ran_at"
_SPARED_KEY = "rescue:spares"
_RELAY_KEY = "relay:ran_at"


def give_sign_of_life(role: str, name: str, queues: list[str], concurrency: int) -> None:
    """Says that this Celery worker is alive and consuming."""
    if away():
        return
    sign = json.dumps({"name": name, "queues": queues, "concurrency": concurrency})
    with best_effort("presence"), client().pipeline(transaction=False) as pipe:
        pipe.set(f"presence:{role}:{name}", sign, ex=PRESENCE_SECONDS)
        pipe.sadd(f"presence:{role}", name)  # the names, so that nobody has to look through all keys
        pipe.expire(f"presence:{role}", PRESENCE_SECONDS)
        pipe.execute()


def withdraw_sign_of_life(role: str, name: str) -> None:
    """Says that this Celery worker has stopped."""
    with best_effort("presence"):
        client().delete(f"presence:{role}:{name}")
        client().srem(f"presence:{role}", name)


def signs_of_life(role: str, within: float = PRESENCE_SECONDS) -> list[dict[str, Any]]:
    """The workers of a role that were alive within so many seconds. Raises `redis.exceptions.RedisError`."""
    names = sorted(map(str, client().smembers(f"presence:{role}")))
    with client().pipeline(transaction=False) as pipe:
        for name in names:
            pipe.get(f"presence:{role}:{name}")
            pipe.pttl(f"presence:{role}:{name}")
        answers = pipe.execute()
    signs = list(zip(names, answers[::2], answers[1::2]))
    if gone := [name for name, sign, _ in signs if not sign]:
        with best_effort("presence"):
            client().srem(f"presence:{role}", *gone)
    oldest = (PRESENCE_SECONDS - within) * 1000
    return [json.loads(sign) for _, sign, left in signs if sign and left >= oldest]


def unserved(queues: Collection[str]) -> list[str]:
    """Those of these queues that no living worker serves. Raises `redis.exceptions.RedisError`."""
    return sorted(set(queues) - {queue for sign in signs_of_life("worker") for queue in sign["queues"]})


def rescue_ran(moment: datetime) -> None:
    """Says that the rescue has looked."""
    with best_effort("rescue"):
        # An hour: who finds nothing takes it for long ago, and that is what it is.
        client().set(_RESCUE_KEY, moment.isoformat(), ex=3600)


def rescue_was_away(now: datetime, longest: float, spared_seconds: float) -> bool:
    """Whether no rescue had looked for longer than that until less than `spared_seconds` ago. False without Redis."""
    with best_effort("rescue"):
        with client().pipeline(transaction=False) as pipe:
            pipe.get(_RESCUE_KEY)
            pipe.get(_SPARED_KEY)
            ran_at, spared = pipe.execute()
        if ran_at is not None and (now - datetime.fromisoformat(ran_at)).total_seconds() <= longest:
            return spared is not None
        client().set(_SPARED_KEY, 1, px=int(spared_seconds * 1000))
        return True
    return False


def relay_ran(moment: datetime) -> None:
    """Says that the relay has drained the outbox."""
    with best_effort("relay"):
        client().set(_RELAY_KEY, moment.isoformat())


def relay_ran_at() -> datetime | None:
    """When the relay last drained the outbox. Raises `redis.exceptions.RedisError`."""
    text = client().get(_RELAY_KEY)
    return None if text is None else datetime.fromisoformat(str(text))
