"""5,000 trivial jobs over 16 connections while two worker processes run: from the first POST until the last is final,
as the store says. Ours and Celery get as many. Peers that no target names get 1,000, which shows the same rate in a
fifth of the time, and RQ, which forks for each job, 300. Procrastinate gets 1,500, which favours it: the more its table
holds, the slower it was."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable

from bench import asking
from bench.figures import Target
from bench.fleet import (
    CELERY, CELERY_ALWAYS, FOR_ORIENTATION, OURS, OURS_POSTGRESQL, PEERS, PROCRASTINATE, RQ, Fleet,
)
from bench.installations import Installation

REPEATS = 3
ONCE = FOR_ORIENTATION
TARGETS = [
    Target("end to end", "jobs_per_second", ours, peer, at_least=ratio)
    for ours in (OURS, OURS_POSTGRESQL) for peer, ratio in ((CELERY, 0.8), (CELERY_ALWAYS, 1.2), (PROCRASTINATE, 1.5))
]
_JOBS = 5000
_JOBS_OF = {**dict.fromkeys(ONCE, 1000), RQ: 300, PROCRASTINATE: 1500}
_STANDSTILL_SECONDS = 60  # longer than a lease and a rescue
_LOOK_SECONDS = 0.05  # how often the store is asked, once all are submitted


def contenders(fleet: Fleet) -> dict[str, Callable[[], dict[str, float]]]:
    """Each has worked off a job before the first is measured."""
    up = fleet.up((OURS, OURS_POSTGRESQL, *PEERS), workers=True)
    return {name: functools.partial(worked_off, each, "/jobs", _JOBS_OF.get(name, _JOBS)) for name, each in up.items()}


def worked_off(installation: Installation, path: str, count: int) -> dict[str, float]:
    """How fast so many submissions to this path are worked off."""
    figures = asking.loaded(installation, "submit", path=path, count=count)
    _wait_finished(installation)
    seconds = time.monotonic() - figures["began"]
    assert not installation.failed(), installation.said()
    return {"jobs_per_second": count / seconds}


def _wait_finished(installation: Installation) -> None:
    """Until all are final. Raises RuntimeError when no more become it."""
    fewest, seen = installation.unfinished(), time.monotonic()
    while (left := installation.unfinished()) > 0:
        if left < fewest:
            fewest, seen = left, time.monotonic()
        if time.monotonic() - seen > _STANDSTILL_SECONDS:
            raise RuntimeError(f"{left} jobs are not final\n{installation.said()}")
        time.sleep(_LOOK_SECONDS)
