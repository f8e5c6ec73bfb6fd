"""The relay's wake tokens: a list in Redis, of which each is taken by one relay. A token says that something is due; a
submission's names the rows that it has committed, which are leased to whoever takes the token: that relay need not
claim them. Any token may get lost: SQL knows all that is due, and once the lease is over the next tick finds it."""
from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from app import outbox, redis_client, states
from app.outbox import Row, Target

KEY = "outbox:wake"
# For so long the rows of a token are left to the relay that takes it: one that stands still for less, on a machine that
# is busy, leads to no second message. What a lost token named waits for so long, and for the next tick.
HANDED_SECONDS = 2.0
_MARGIN_SECONDS = 0.25  # before that ends: to publish and to mark takes a tenth of a second
_TRIM_EVERY = 50  # tokens of a process: for each it would be a third of what a token costs
_MOST = 1000  # tokens, when no relay takes them: more than submissions commit within a tick
_AT_ONE_TIME = 100  # as many as a relay's claim takes rows: a relay that is torn away leaves little to its next tick

_numbers = itertools.count()


def commands(token: str = "[]") -> tuple[tuple[Any, ...], ...]:
    """The Redis commands that leave a token."""
    trims = next(_numbers) % _TRIM_EVERY == 0
    return ("RPUSH", KEY, token), *([("LTRIM", KEY, -_MOST, -1)] if trims else [])


def leased_until(now: datetime) -> datetime | None:
    """Until when rows that are committed now are left to the relay that takes their token; None while there can be no
    token."""
    return None if redis_client.away() else now + timedelta(seconds=HANDED_SECONDS)


def has_time(row: Row, now: datetime) -> bool:
    """Whether a row that was handed over is still left to whoever took its token."""
    return row.leased_until is not None and now + timedelta(seconds=_MARGIN_SECONDS) < row.leased_until


def hand_over(task: str, targets: Sequence[Target], until: datetime | None) -> None:
    """Leaves a token with rows that were staged like this, and are leased until then to whoever takes it, before
    anything else is said to Redis: what this thread asks next is answered after it."""
    if not redis_client.away():
        with redis_client.best_effort("wake"):
            redis_client.tell(*commands(json.dumps([task, until.isoformat(), targets]) if until else "[]"))


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
    if found is None:
        return []
    first = _rows(found[1])
    return [first] if first else [first, *take()]  # one claim does for all that are there


def take() -> list[list[Row]]:
    """As `wait`, for no time: all that are there, up to some."""
    found: Any = None
    if not redis_client.away():
        with redis_client.best_effort("wake"):
            found = redis_client.client().lpop(KEY, _AT_ONE_TIME)
    return [_rows(token) for token in found or ()]


def _rows(token: str) -> list[Row]:
    try:
        task, until, targets = json.loads(token)
        ends = datetime.fromisoformat(until)
        staged_at = ends - timedelta(seconds=HANDED_SECONDS)
        if task not in states.OUTBOX_TASKS or ends.tzinfo is None:
            return []
        return [outbox.handed_over(task, _target(*target), staged_at, ends) for target in targets]
    except (ValueError, TypeError, OverflowError):  # another version's, or a stranger's: something is due
        return []


def _target(target_id: str, queue: str, seconds: float | None, together: str | None) -> Target:
    for text in (target_id, queue, "" if together is None else together):
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError("no row of the outbox")
    return target_id, queue, seconds and float(seconds), together
