"""The relay's wake tokens: a list in Redis, of which each is taken by one relay. A token says that something is due; a
submission's names the rows that were committed a moment ago, so that the relay need not look for them. Any of them may
get lost: SQL knows all that is due, and the relay's next tick finds it."""
from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from app import outbox, redis_client
from app.outbox import Row

KEY = "outbox:wake"
_MOST = 1000  # tokens, when no relay takes them: more than submissions commit within a tick
_AT_ONE_TIME = 100  # as many as a relay's claim takes rows: a relay that is torn away leaves little to its next tick


def commands(handed: Sequence[Row] = ()) -> tuple[tuple[Any, ...], ...]:
    """The Redis commands that leave a token, with these rows."""
    token = json.dumps([
        [row.task, row.target_id, row.queue, row.time_limit_seconds, row.available_at.isoformat(), row.together]
        for row in handed])
    return ("RPUSH", KEY, token), ("LTRIM", KEY, -_MOST, -1)


def hand_over(rows: Sequence[Row]) -> None:
    """Leaves a token with these rows, before anything else is said to Redis: the thread that says it next waits for
    both."""
    if not redis_client.away():
        with redis_client.best_effort("wake"):
            redis_client.tell(*commands(rows))


def relay() -> None:
    """Tells a waiting relay that the outbox has something due. Without Redis it finds out at its next tick."""
    if not redis_client.away():
        with redis_client.best_effort("wake"):
            redis_client.ask(*commands())


def wait(seconds: float) -> list[list[Row]]:
    """Waits for a token, at most this long: the rows of each, none of one that says only that something is due. Empty
    when none came or Redis is away."""
    if seconds <= 0:
        return []
    try:
        found: Any = redis_client.waiting_client().blpop([KEY], timeout=seconds)
    except redis_client.TROUBLE:
        return []
    return [] if found is None else [_rows(found[1])]


def take() -> list[list[Row]]:
    """As `wait`, for no time: all that are there, up to some."""
    try:
        found: Any = redis_client.waiting_client().lpop(KEY, _AT_ONE_TIME)
    except redis_client.TROUBLE:
        return []
    return [_rows(token) for token in found or ()]


def _rows(token: str) -> list[Row]:
    try:
        return [
            outbox.staged(task, target_id, queue, seconds, datetime.fromisoformat(available_at), together)
            for task, target_id, queue, seconds, available_at, together in json.loads(token)]
    except (ValueError, TypeError):  # another version's: it says that something is due
        return []
