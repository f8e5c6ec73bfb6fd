"""When waiting jobs will start, from what is known of the slots, of the jobs that run, and of those that wait. No more
than arithmetic."""
from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Queue:
    """A queue as it was: who waits since when, and in how many seconds each starts."""

    slots: int = 1
    since: list[datetime] = field(default_factory=list)  # of those that wait, the longest first
    starts: list[float] = field(default_factory=lambda: [0.0])  # of each of them, and of one behind them all
    length: int = 0  # of the whole queue, of which `since` may be the first part
    newest: datetime = LONG_AGO

    def seconds_before(self, since: datetime) -> float:
        """In how many seconds a job starts that waits since then. What is behind the known part is taken to be like
        it."""
        place = bisect.bisect_left(self.since, since)
        if place < len(self.since) or self.length <= len(self.since):
            return self.starts[place]
        span = (self.newest - self.since[-1]).total_seconds()
        behind = min(1.0, (since - self.since[-1]).total_seconds() / span) if span > 0 else 1.0
        each = (self.starts[-1] - self.starts[0]) / len(self.since)
        return self.starts[-1] + behind * (self.length - len(self.since)) * each


def left(usual: float, elapsed: float) -> float:
    """What is left of a run that usually takes so long; one that takes longer is expected to take as long again as it
    is late. Nothing when it is not known what is usual."""
    return abs(usual - elapsed) if usual else 0.0


def pools(queues: Collection[str], signs: Iterable[Mapping[str, Any]]) -> list[tuple[set[str], int]]:
    """The queues in groups that share workers, each with its slots: 0 where no worker has shown itself."""
    found: list[tuple[set[str], int]] = []
    for sign in signs:
        served, slots = set(sign["queues"]), sign["concurrency"]
        for pool in [pool for pool in found if pool[0] & served]:
            found.remove(pool)
            served, slots = served | pool[0], slots + pool[1]
        found.append((served, slots))
    known = {queue for served, _ in found for queue in served}
    return [(served & set(queues), slots) for served, slots in found] + [({name}, 0) for name in set(queues) - known]


def starts(slots: int, running: list[float], waiting: Mapping[str, Iterable[float]]) -> dict[str, list[float]]:
    """In how many seconds each waiting job of a pool starts, and one more behind each queue: a slot that becomes free
    takes the first of the next queue in turn.

    `running`: how long each running job still runs; as many slots as these when their number is not known.
    `waiting`: how long each waiting job will run.
    """
    slots = slots or max(1, len(running))
    free = heapq.nlargest(slots, [*running, *[0.0] * slots])  # of more, the oldest are those of a dead worker
    heapq.heapify(free)
    found: dict[str, list[float]] = {name: [] for name in waiting}
    turns = deque((name, iter(each)) for name, each in waiting.items())
    while turns:
        name, rest = turns.popleft()
        found[name].append(free[0])
        if (seconds := next(rest, None)) is not None:
            heapq.heapreplace(free, free[0] + seconds)
            turns.append((name, rest))
    return found
