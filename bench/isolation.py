"""Whether callbacks to an endpoint that answers are as fast beside ones that hang.

Each sort of run has an installation of real processes of its own, and each run endpoints of its own. 200 callbacks go
to an endpoint that answers; interleaved with their jobs are as many others, which call nobody back, a second endpoint
that answers, one that hangs, or 20 hosts that hang. Told is how the 200 fare: from the end of a job to its callback,
and from the first submission to the last callback. Runs alternate, and medians are told. The ratio is to the first; the
second shows what as many other callbacks cost by themselves. `make bench` measures one endpoint that hangs against one
that answers; `python -m bench.isolation` prints a table of all sorts.
"""
from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import stores
from bench.figures import Target
from tests import receiver, servers
from tests.processes import Site
from tests.servers import wait_until

CALLBACKS = 200
REPEATS = 3
_DATABASES = ("SQLite", "PostgreSQL")
TARGETS = [Target("isolation", "all_of_them_seconds", f"{database}, the others hang", f"{database}, the others answer",
                  at_most=1.5) for database in _DATABASES]
_OTHERS = {"none": 0, "an endpoint that answers": 0, "an endpoint that hangs": 1, "20 hosts that hang": 20}  # hanging


def contenders(stack: contextlib.ExitStack) -> dict[str, Callable[[], dict[str, float]]]:
    """On each database: the other half of the callbacks go to an endpoint that answers, or to one that hangs."""
    server = stack.enter_context(stores.postgres())
    settings = {"SQLite": dict, "PostgreSQL": lambda: {"DATABASE_URL": server.url(server.new_database())}}
    sorts = [(database, *sort) for database in _DATABASES
             for sort in (("answer", "an endpoint that answers"), ("hang", "an endpoint that hangs"))]
    with ThreadPoolExecutor() as pool:
        sites = list(pool.map(lambda given: stack.enter_context(site(**given)), [settings[one]() for one, *_ in sorts]))
    return {f"{database}, the others {do}": functools.partial(_figures, run, each)
            for (database, do, run), each in zip(sorts, sites)}


def _figures(run: str, site: Site) -> dict[str, float]:
    each = measure(run, site)
    return {"median_wait_ms": each.median * 1000, "slowest_ms": each.slowest * 1000,
            "all_of_them_seconds": each.all_of_them}


@dataclass(frozen=True)
class Run:
    """How the 200 fared, in seconds."""

    median: float
    slowest: float
    all_of_them: float


@contextlib.contextmanager
def _others(run: str) -> Iterator[list[receiver.Receiver]]:
    hangs = threading.Event()
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(receiver.receiver()) for _ in range(_OTHERS[run] or 1)]
        if _OTHERS[run]:
            for other in made:
                other.respond = lambda *_: hangs.wait(60) and None
        try:
            yield made
        finally:
            hangs.set()


@contextlib.contextmanager
def site(**settings: Any) -> Iterator[Site]:
    """An installation that has worked off a job."""
    with tempfile.TemporaryDirectory() as folder, Site(Path(folder), CALLBACK_ALLOW="127.0.0.0/8", **settings) as made:
        stack = made.start("web", "worker", "courier", "beat", "redis")
        made.wait_ready()
        made.poll(made.submit(n=10))
        yield made
        stack.kill()


def measure(run: str, site: Site) -> Run:
    """One run."""
    with receiver.receiver() as well, _others(run) as others:
        began = time.time()
        for number in range(CALLBACKS):
            site.submit(n=10, callback_url=well.url)
            other = {} if run == "none" else {"callback_url": others[number % len(others)].url}
            site.submit(n=10, **other)
        wait_until(lambda: len(well.hooks) >= CALLBACKS, 600, "all callbacks")
    waits = [hook.at - _ended(hook) for hook in well.hooks]
    return Run(statistics.median(waits), max(waits), max(hook.at for hook in well.hooks) - began)


def _ended(hook: receiver.Hook) -> float:
    return datetime.fromisoformat(json.loads(hook.body)["timestamp"]).timestamp()


def report(database: str, new_settings: Callable[[], dict[str, str]]) -> None:
    """Measures all sorts of runs in turn, and prints a line of each."""
    runs: dict[str, list[Run]] = {run: [] for run in _OTHERS}
    with contextlib.ExitStack() as stack:
        sites = {run: stack.enter_context(site(**new_settings())) for run in _OTHERS}
        for _ in range(REPEATS):
            for run in _OTHERS:
                runs[run].append(measure(run, sites[run]))
    plain = None
    for run, each in runs.items():
        median, slowest, total = (
            statistics.median(getattr(one, name) for one in each) for name in ("median", "slowest", "all_of_them"))
        plain = plain or total
        print(f"| {database} | {run} | {median * 1000:.0f} ms | {slowest * 1000:.0f} ms | {total:.1f} s "
              f"| {total / plain:.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    print(f"{CALLBACKS} callbacks to an endpoint that answers, interleaved with as many others; medians of {REPEATS}\n")
    print("| database | the others go to | median wait | slowest | all of them | ratio |\n"
          "| --- | --- | --- | --- | --- | --- |", flush=True)
    report("sqlite", dict)
    with servers.postgres() as server:
        report("postgresql", lambda: {"DATABASE_URL": server.url(server.new_database())})


if __name__ == "__main__":
    main()
