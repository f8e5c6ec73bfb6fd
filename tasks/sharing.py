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
# slot may wait for jobs that lie behind others; and at 16 a message costs a tenth of what they take themselves.
_IN_TURN_SECONDS = 0.1
_HANDLING_SECONDS = 0.003  # what each takes beside its run
IN_TURN = 16
# After so long what has not begun goes back. Some times the above: a disk that is slow for a moment sends nobody back.
MOST_SECONDS = 0.25
_KNOWN_SECONDS = 1.0  # for so long one look at the run times does

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
    """How many jobs of a kind may share a message now. One of a kind that is not known here, or whose run times are
    not known."""
    known = kinds.registry().get(kind)
    if known is None or known.together:
        return TOGETHER if known else 1
    until, most = _known.get(kind, (0.0, 1))
    if time.monotonic() >= until:
        most = _in_turn(known)
        _known[kind] = time.monotonic() + _KNOWN_SECONDS, most
    return most


def _in_turn(kind: Kind) -> int:
    try:
        with db.reading() as view:
            seconds = outlook.mean_run(view, kind.name)
    except SQLAlchemyError:
        return 1
    return 1 if seconds is None else max(1, min(IN_TURN, int(_IN_TURN_SECONDS / (seconds + _HANDLING_SECONDS))))


def forget() -> None:
    """Makes the next look at the run times a new one."""
    _known.clear()
