"""What the processes hold in memory after many jobs, against after few.

A fresh installation of real processes; jobs come through POST /jobs, one of TOLD with a callback. Told is the resident
size of each process, in megabytes, once all jobs are done and the view has let go of them: after FEW and after MANY.
`python -m bench.memory` does the whole: 5,000 against 50,000.
"""
from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from app import status
from bench.figures import Target
from tests import receiver
from tests.processes import Process, Site
from tests.servers import wait_until

FEW, MANY = (int(os.environ.get(name, default)) for name, default in (("FEW", 5_000), ("MANY", 20_000)))
TOLD = 10
REPEATS = 1
_CLIENTS = 8
_LINES = ("web", "worker", "courier", "beat", "redis")
# The words of a command line that say which process it is.
_NAMES = {"app.api": "web", "valkey": "redis", **{f"tasks {name}": name for name in ("worker", "courier", "beat")}}
_CHILDREN = ("web", "worker")

TARGETS = [
    Target(f"memory of {name}", f"{name} MB", f"after {MANY} jobs", f"after {FEW} jobs", at_most=1.1)
    for name in (*_NAMES.values(), *(f"{name} child" for name in _CHILDREN))]


def contenders(kept: contextlib.ExitStack) -> dict[str, Callable[[], dict[str, float]]]:
    """One installation, after few jobs and then after many."""
    told = kept.enter_context(receiver.receiver())
    folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
    site = kept.enter_context(Site(folder, CALLBACK_ALLOW=f"127.0.0.1:{told.port}", MAX_BACKLOG=10 * MANY))
    stack = site.start(*_LINES)
    site.wait_ready()

    def after(number: int) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            _submit(site, number - _done(site), told.url)
            wait_until(lambda: _done(site) >= number, 3600, f"{number} jobs")
            wait_until(lambda: not site.sql("SELECT 1 FROM outbox LIMIT 1"), 600, "an empty outbox")
            time.sleep(status.ENDED_TTL_SECONDS + 5)  # what the view lets go of
            return _sizes(stack)

        return run

    return {f"after {number} jobs": after(number) for number in (FEW, MANY)}


def _done(site: Site) -> int:
    return int(site.sql("SELECT count(*) FROM jobs WHERE finished_at IS NOT NULL")[0][0])


def _submit(site: Site, number: int, url: str) -> None:
    clients = [threading.Thread(target=_client, args=(site.port, number // _CLIENTS, url)) for _ in range(_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    _client(site.port, number % _CLIENTS, url)


def _client(port: int, number: int, url: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        for one in range(number):
            body = {"n": 10} if one % TOLD else {"n": 10, "callback_url": url}
            connection.request("POST", "/jobs", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 202, answer.read()
            answer.read()


def _sizes(stack: Process) -> dict[str, float]:
    """Of each sort of process; of several children the largest."""
    found: dict[str, float] = {}
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            name = next((name for words, name in _NAMES.items() if words in command), None)
            if name is None:
                continue
            parent = process.parent()
            if parent is not None and parent.cmdline() == process.cmdline():
                name += " child"
            found[f"{name} MB"] = max(found.get(f"{name} MB", 0.0), process.memory_info().rss / 1e6)
    return found


def main() -> None:
    """Prints what each process holds after few jobs and after many."""
    with contextlib.ExitStack() as kept:
        few, many = (run() for run in contenders(kept).values())
        for name in few:
            print(f"{name}: {few[name]:.1f} after {FEW}, {many[name]:.1f} after {MANY}, {many[name] / few[name]:.2f}")


if __name__ == "__main__":
    if "MANY" not in os.environ:
        os.environ["MANY"] = "50000"
        os.execv(sys.executable, [sys.executable, "-m", "bench.memory"])
    main()
