"""One job at a time: from before its POST until a client that polls without pause, on the same connection, sees the
result. 200 jobs a run, with the workers of all contenders up and idle."""
from __future__ import annotations

import functools
from collections.abc import Callable

from bench import asking
from bench.figures import Target
from bench.fleet import CELERY, OURS, OURS_POSTGRESQL, PEERS, Fleet
from bench.installations import Installation

REPEATS = 3
ONCE = frozenset(PEERS) - {CELERY}  # for orientation
_A_RELAY_INTERVAL_MS = 1000
TARGETS = [target for ours in (OURS, OURS_POSTGRESQL) for target in (
    Target("reaction", "p50_ms", ours, CELERY, at_most=1.5),
    Target("reaction", "p99_ms", ours, CELERY, at_most=3.0),
    Target("reaction, below a relay interval", "max_ms", ours, at_most=_A_RELAY_INTERVAL_MS),
)]
_JOBS = 200


def contenders(fleet: Fleet) -> dict[str, Callable[[], dict[str, float]]]:
    """Each has worked off a job before the first is measured."""
    up = fleet.up((OURS, OURS_POSTGRESQL, *PEERS), workers=True)
    return {name: functools.partial(_run, each) for name, each in up.items()}


def _run(installation: Installation) -> dict[str, float]:
    figures = asking.loaded(installation, "react", count=_JOBS)
    return {name: figures[name] for name in ("p50_ms", "p99_ms", "max_ms")}
