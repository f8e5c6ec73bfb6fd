"""How long a second `make run` takes to its first 202: every line of the Procfile, on a folder that has been used.

`python -m bench.start` prints it, with the processor time that all processes have taken until then.
"""
from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from bench.figures import Target
from tests.processes import Process, Site

REPEATS = 3
LIMIT_SECONDS = 3.0
_LOOK_SECONDS = 0.01
_BODY = json.dumps({"n": 5})
OURS = "make run"

TARGETS = [Target("start: make run to the first 202", "seconds", OURS, at_most=LIMIT_SECONDS)]


def contenders(kept: contextlib.ExitStack) -> dict[str, Callable[[], dict[str, float]]]:
    """`make run`."""
    site = kept.enter_context(Site(Path(kept.enter_context(tempfile.TemporaryDirectory()))))
    _start(site)  # the first time is not counted
    return {OURS: lambda: _start(site)}


def _start(site: Site) -> dict[str, float]:
    began = time.monotonic()
    stack = site.run("make", "make", "--no-print-directory", "run")
    while not _accepts(site.port):
        time.sleep(_LOOK_SECONDS)
    taken = time.monotonic() - began
    used = _processor_seconds(stack)
    stack.part("app.stack").terminate()
    stack.popen.wait(30)
    return {"seconds": taken, "processor seconds": used}


def _accepts(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        try:
            connection.request("POST", "/jobs", _BODY, {"Content-Type": "application/json"})
            return connection.getresponse().status == 202
        except (ConnectionError, http.client.HTTPException):
            return False


def _processor_seconds(stack: Process) -> float:
    used = 0.0
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


def main() -> None:
    """Prints a line for each start."""
    with contextlib.ExitStack() as kept:
        start = contenders(kept)[OURS]
        for _ in range(REPEATS):
            print(", ".join(f"{value:.2f} {figure}" for figure, value in start().items()), flush=True)


if __name__ == "__main__":
    main()
