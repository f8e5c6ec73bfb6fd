"""GET /jobs/<id> of a finished job and of one that waits, over 16 connections, while no worker runs; and the ceilings:
a Flask route behind the same server that does nothing, and one that does one HGETALL."""
from __future__ import annotations

import functools
from collections.abc import Callable

from bench import asking
from bench.figures import Target
from bench.fleet import BARE, CELERY, DRAMATIQ, HUEY_REDIS, HUEY_SQLITE, OURS, OURS_POSTGRESQL, PROCRASTINATE, RQ, Fleet
from bench.installations import Installation

REPEATS = 3
ONCE = frozenset({RQ, HUEY_SQLITE, HUEY_REDIS, DRAMATIQ, PROCRASTINATE})  # for orientation
BARE_HASH = "bare Flask route, one HGETALL"
TARGETS = [
    Target(f"poll, {state}", f"{state}_requests_per_second", ours, peer, at_least=ratio)
    for ours in (OURS, OURS_POSTGRESQL) for peer, ratio in ((CELERY, 1.3), (BARE_HASH, 0.9))
    for state in ("finished", "unfinished")
]
_SECONDS = 1.2
_NAMES = (OURS, OURS_POSTGRESQL, CELERY, RQ, HUEY_SQLITE, HUEY_REDIS, DRAMATIQ, PROCRASTINATE)
# A hash like that of a finished job of ours.
_HASH = {"version": 3, "job_id": "0" * 36, "kind": "primes", "status": "succeeded", "attempt": 1, "owner": "everybody",
         "document": "x" * 330}


def contenders(fleet: Fleet) -> dict[str, Callable[[], dict[str, float]]]:
    """The workers run until each has finished a job."""
    finished = {name: asking.finished_job(each) for name, each in fleet.up(_NAMES, workers=True).items()}
    up = fleet.up((*_NAMES, BARE), workers=False)
    bare = up.pop(BARE)
    runs: dict[str, Callable[[], dict[str, float]]] = {
        name: functools.partial(_run, each, finished[name], asking.submit(each)) for name, each in up.items()}
    bare.store.jobs.hset("job:x", mapping=_HASH)
    runs[BARE] = functools.partial(_ceiling, bare, "/jobs/x")
    runs[BARE_HASH] = functools.partial(_ceiling, bare, "/hashes/x")
    return runs


def _run(installation: Installation, finished: str, unfinished: str) -> dict[str, float]:
    return _polled(installation, "finished", f"/jobs/{finished}") | _polled(
        installation, "unfinished", f"/jobs/{unfinished}")


def _polled(installation: Installation, state: str, path: str) -> dict[str, float]:
    figures = asking.loaded(installation, "poll", path=path, seconds=_SECONDS)
    return {f"{state}_{name}": figures[name] for name in ("requests_per_second", "p99_ms")}


def _ceiling(installation: Installation, path: str) -> dict[str, float]:
    """To which both sorts of polls are compared."""
    figures = _polled(installation, "finished", path)
    return figures | {name.replace("finished", "unfinished"): value for name, value in figures.items()}
