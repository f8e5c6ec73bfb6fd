"""POST /jobs over 16 connections, each body a new one, without a key. The web and what belongs to it are up (ours with
its courier and beat, which publish meanwhile), the workers are not, alike for all."""
from __future__ import annotations

import functools
from collections.abc import Callable

from bench import asking
from bench.figures import Target
from bench.fleet import BARE, CELERY, OURS, OURS_POSTGRESQL, PEERS, PROCRASTINATE, Fleet
from bench.installations import Installation
from tests.servers import wait_until

REPEATS = 3
ONCE = frozenset({*PEERS, BARE}) - {CELERY, PROCRASTINATE}  # for orientation
TARGETS = [
    Target("submit", "requests_per_second", OURS, CELERY, at_least=1.0),
    Target("submit", "p99_ms", OURS, CELERY, at_most=1.0),
    Target("submit", "requests_per_second", OURS_POSTGRESQL, CELERY, at_least=0.8),
    Target("submit", "requests_per_second", OURS_POSTGRESQL, PROCRASTINATE, at_least=1.0),
]
_SECONDS = 2


def contenders(fleet: Fleet) -> dict[str, Callable[[], dict[str, float]]]:
    """Each keeps what earlier runs have submitted: none has workers to work it off."""
    up = fleet.up((OURS, OURS_POSTGRESQL, *PEERS, BARE), workers=False)
    return {name: functools.partial(_run, each) for name, each in up.items()}


def _run(installation: Installation) -> dict[str, float]:
    figures = asking.loaded(installation, "submit", seconds=_SECONDS)
    wait_until(installation.settled, 60, "all is published")  # so that the next one is not slowed by it
    return {name: figures[name] for name in ("requests_per_second", "p50_ms", "p99_ms")}
