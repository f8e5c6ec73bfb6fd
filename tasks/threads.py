"""The courier's threads: how many of them callbacks may hold, so that what hangs holds up nobody else.

Some are left to the relay and the rescue. Of the rest, half are kept for endpoints that answer, and answer soon; those
that failed last get a quarter at most: one that nobody has tried yet finds a thread beside them.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from app import states
from app.config import settings

FOR_THE_RELAY = 3  # two relays at a time (`tasks.relay_outbox`), and one for the rescue or the pruning
_counting = threading.Lock()
_taken = {"all": 0, "not well": 0, "failing": 0}


@contextlib.contextmanager
def one(standing: str | None) -> Iterator[bool]:
    """Whether a callback to an endpoint of this standing (None: not tried yet) may hold a thread, for the block."""
    shares = [share for share, counts in (
        ("all", True), ("not well", standing != states.WELL), ("failing", standing == states.FAILING)) if counts]
    with _counting:
        granted = all(_taken[share] < _most(share) for share in shares)
        for share in shares:
            _taken[share] += granted
    try:
        yield granted
    finally:
        with _counting:
            for share in shares:
                _taken[share] -= granted


def are_free() -> bool:
    """Whether less than half of them are held, so that nobody waits for one."""
    return _taken["all"] < _most("all") // 2


def _most(share: str) -> int:
    threads = settings().courier_concurrency - FOR_THE_RELAY
    return max(1, threads // {"all": 1, "not well": 2, "failing": 4}[share])
