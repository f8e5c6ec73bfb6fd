"""Which outbox rows share a message: first attempts of short jobs of one kind. To Celery a message is more work than
such a job is itself."""
from __future__ import annotations

import time
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from app import db, kinds, outlook
from app.kinds import Kind
from app.outbox import Row

# Of kinds that share a transaction: it holds up SQLite's other writers for some ten milliseconds, and a crash in it
# delays them all; and the two messages of a full batch are enough that their own cost no longer counts.
TOGETHER = 50
# Of other kinds: as many as run within this time one after another, as far as the latest of them tell. So long a free
# slot may wait for jobs that lie behind others; with 16 a message costs each job less than its log line.
_IN_TURN_SECONDS = 0.1
_HANDLING_SECONDS = 0.003  # what each takes beside its run: its part of a commit and of a round trip
IN_TURN = 16
# After so long what has not begun goes back, to the end of the queue. Some times the above: a disk that is slow for a
# moment sends nobody back. A kind of whose latest jobs one took longer shares none.
MOST_SECONDS = 0.25
_LATELY = 100  # jobs: one in a hundred that takes long sends few back
_SHORTEST_LIMIT_SECONDS = 10.0  # the limit is the message's, and the last job begins up to MOST_SECONDS after the first
_KNOWN_SECONDS = 1.0  # for so long one look at the run times does; a busy relay has ten messages and more in it

_known: dict[str, tuple[float, int]] = {}  # by kind: until when (`time.monotonic`), and how many


def messages(rows: list[Row]) -> list[list[Row]]:
    """The rows of each message, in their order: most in one of their own."""
    found: list[list[Row]] = []
    shared: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike = (row.queue, row.task, row.time_limit_seconds, row.together)
        if row.together is None or alike not in shared or len(shared[alike]) >= most_of(row.together):
            found.append([])
            shared[alike] = found[-1]
        shared[alike].append(row)
    return found


def task_of(row: Row) -> tuple[str, float]:
    """The task that works off a message which this row shares with others, and how many seconds may pass before the
    last of them begins."""
    kind = kinds.registry().get(row.together or "")
    return ("tasks.run_together", 0.0) if kind is not None and kind.together else ("tasks.run_in_turn", MOST_SECONDS)


def most_of(kind: str) -> int:
    """How many jobs of a kind may share a message now: 1 when the kind is not known here, or when it is not known how
    long its jobs take."""
    known = kinds.registry().get(kind)
    if known is None or known.together:
        return TOGETHER if known else 1
    until, most = _known.get(kind, (0.0, 1))
    if time.monotonic() >= until:
        most = _in_turn(known)
        _known[kind] = time.monotonic() + _KNOWN_SECONDS, most
    return most


def _in_turn(kind: Kind) -> int:
    if kind.time_limit < _SHORTEST_LIMIT_SECONDS:
        return 1
    try:
        with db.reading() as view:
            seconds = outlook.runs(view, kind.name, _LATELY)
    except SQLAlchemyError:
        return 1
    if not seconds or max(seconds) > MOST_SECONDS:
        return 1
    return max(1, min(IN_TURN, int(_IN_TURN_SECONDS / (sum(seconds) / len(seconds) + _HANDLING_SECONDS))))


def forget() -> None:
    """Makes the next look at the run times a new one."""
    _known.clear()
