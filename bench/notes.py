"""5,000 notes over 16 connections, each with its history, while two worker processes run: from the first POST until
the last history is written. The peer keeps its notes in SQLite (WAL) and hands the history to Celery, whose message is
not durable; it gets 1,500, which shows the same rate in less time."""
from __future__ import annotations

import functools
from collections.abc import Callable

from bench import end_to_end
from bench.figures import Target
from bench.fleet import CELERY, OURS, OURS_POSTGRESQL, Fleet

REPEATS = 3
TARGETS = [Target("end to end, notes", "jobs_per_second", ours, CELERY, at_least=2.0)
           for ours in (OURS, OURS_POSTGRESQL)]
_NOTES = 5000
_NOTES_OF = {CELERY: 1500}


def contenders(fleet: Fleet) -> dict[str, Callable[[], dict[str, float]]]:
    """Each has worked off a job before the first note."""
    up = fleet.up((OURS, OURS_POSTGRESQL, CELERY), workers=True)
    return {name: functools.partial(end_to_end.worked_off, each, "/notes", _NOTES_OF.get(name, _NOTES))
            for name, each in up.items()}
