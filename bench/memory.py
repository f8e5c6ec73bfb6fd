"""What the processes hold in memory after 50,000 jobs, against after 5,000.

A fresh installation of real processes. Jobs come through POST /jobs, one of ten with a callback, and two of three
through POST /notes, which takes a third of the time. No crowd is larger than the first: the 5,000 come at once, the
others 1,500 at a time, each crowd when the one before is done; and a result lives for five seconds instead of a day.
For the Valkey of `redis` keeps what its largest crowd took (its C library reuses what is free, and gives little back).
Told is the resident size of each process, in megabytes, once the view has let go of all jobs. `python -m bench.memory`
prints it; FEW and MANY make it smaller.
"""
from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pysqlite3 import dbapi2

from app import status
from bench import load, receiving
from bench.figures import Target
from tests.processes import Process, Site

FEW, MANY = (int(os.environ.get(name, default)) for name, default in (("FEW", 5_000), ("MANY", 50_000)))
REPEATS = 1
_CROWD = 1_500  # after the first
_RESULT_TTL_SECONDS = 5
_SHARES = {"/jobs": 1 / 3, "/notes": 2 / 3}
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0  # for a crowd
_LINES = ("web", "worker", "courier", "beat", "redis")
_ALL = "SELECT (SELECT count(*) FROM jobs) + (SELECT count(*) FROM tombstones)"
# The words of a command line that say which process it is.
_NAMES = {"app.api": "web", "valkey": "redis", **{f"tasks {name}": name for name in ("worker", "courier", "beat")}}
_CHILDREN = ("web", "worker")

TARGETS = [
    Target(f"memory of {name}", f"{name} MB", f"after {MANY} jobs", f"after {FEW} jobs", at_most=1.1)
    for name in (*_NAMES.values(), *(f"{name} child" for name in _CHILDREN))]


def contenders(kept: contextlib.ExitStack) -> dict[str, Callable[[], dict[str, float]]]:
    """One installation, after few jobs and then after many."""
    told = kept.enter_context(receiving.receiver())
    folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
    settings = {"CALLBACK_ALLOW": f"127.0.0.1:{told.port}", "RESULT_TTL_SECONDS": _RESULT_TTL_SECONDS}
    site = kept.enter_context(Site(folder, **settings))
    stack = site.start(*_LINES)
    site.wait_ready()

    def after(number: int) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            _work_off(site, number, f"{told.url}/hook")
            time.sleep(status.UNFINISHED_TTL_SECONDS + 2)  # what the view lets go of
            return _sizes(stack)

        return run

    return {f"after {number} jobs": after(number) for number in (FEW, MANY)}


def _work_off(site: Site, number: int, told: str) -> None:
    """Until so many are done, of those before too."""
    with contextlib.closing(dbapi2.connect(site.folder / "jobs.sqlite3", timeout=30)) as view:
        while (done := _one(view, _ALL)) < number:
            crowd = min(_CROWD, number - done) if done else number
            for path, share in _SHARES.items():
                load.submit(site.port, path, max(1, round(crowd * share)), told if path == "/jobs" else None)
            _wait_done(view)


def _wait_done(view: dbapi2.Connection) -> None:
    """Until nothing is under way: no job, no message, no callback."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _one(view, "SELECT count(*) FROM outbox") or _one(
            view, "SELECT count(*) FROM jobs WHERE status IN ('queued', 'running')"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done within {_PATIENCE_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)


def _one(view: dbapi2.Connection, statement: str) -> int:
    return int(view.execute(statement).fetchone()[0])


def _sizes(stack: Process) -> dict[str, float]:
    """Of each sort of process; of several children the largest."""
    found: dict[str, float] = {}
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := name_of(process)) is not None:
                found[f"{name} MB"] = max(found.get(f"{name} MB", 0.0), process.memory_info().rss / 1e6)
    return found


def name_of(process: psutil.Process) -> str | None:
    """Which line of the Procfile it is, or ` child` of which. Raises psutil.NoSuchProcess."""
    command = process.cmdline()
    name = next((name for words, name in _NAMES.items() if words in " ".join(command)), None)
    parent = process.parent()
    return f"{name} child" if name is not None and parent is not None and parent.cmdline() == command else name


def main() -> None:
    """Prints what each process holds after few jobs and after many."""
    with contextlib.ExitStack() as kept:
        few, many = (run() for run in contenders(kept).values())
        for name in few:
            print(f"{name}: {few[name]:.1f} after {FEW}, {many[name]:.1f} after {MANY}, {many[name] / few[name]:.2f}")


if __name__ == "__main__":
    main()
