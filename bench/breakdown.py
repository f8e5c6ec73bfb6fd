"""Where one submission, one poll, one job and one callback spend their time: `python -m bench.breakdown` prints tables,
and puts them into docs/performance.md. One at a time, on an installation of real processes that does nothing else: what
passes between the marks (bench.marks) that our functions leave, medians, in microseconds. A mark itself takes some
five. ROUNDS makes it shorter.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import installations, load, machine, receiving, report, stores
from tests.servers import wait_until

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
ROUNDS = int(os.environ.get("ROUNDS") or 300)
_PATIENCE_SECONDS = 30.0
_WARM_UP = 20  # of the rounds, not counted: connections, first statements
_SENT, _ANSWERED, _SEEN = "sent", "answered", "seen"

# What ends with each mark, in their order.
Steps = dict[str, str]
SUBMIT: Steps = {
    "begin_request begins": "the server, Flask: until our first line",
    "submit_job begins": "finding the owner, reading and validating the body",
    "write begins": "SQLite's turn, BEGIN; or a connection of the pool",
    "write ends": "the rows of job and outbox (PostgreSQL: BEGIN, COMMIT and the disk too)",
    "shown begins": "COMMIT, and the disk",
    "hand_over ends": "the wake token",
    "shown ends": "showing the job in Redis",
    "finish_response ends": "log line, estimate, answer",
    _ANSWERED: "the server, until the client has it",
}
POLL: Steps = {
    "begin_request begins": SUBMIT["begin_request begins"],
    "read begins": "finding the owner, routing",
    "read ends": "a round trip to Redis",
    "answer ends": "ETag, estimate, headers",
    "finish_response ends": "counting",
    _ANSWERED: SUBMIT[_ANSWERED],
}
JOB: Steps = {
    "hand_over begins": "its submission, until it is committed",
    "publish_all begins": "the wake token, until the relay has it",
    "publish_all ends": "publishing",
    "claim begins": "Celery, from the broker to the process that runs it",
    "start_by_message begins": "SQLite's turn, BEGIN",
    "start_by_message ends": "the claim (PostgreSQL: BEGIN too)",
    "write_in_passing begins": "COMMIT, and the disk",
    "write_in_passing ends": "showing that it runs",
    "finish begins": "its function, its input and result",
    "succeed begins": "SQLite's turn, BEGIN",
    "succeed ends": "its end (PostgreSQL: BEGIN too)",
    "write_all begins": "COMMIT, and the disk",
    _SEEN: "showing it in Redis, until a client that polls without pause has it",
}
CALLBACK: Steps = {
    "run begins": "from the job's end: the wake token, the relay's claim, Celery",
    "look ends": "reading it, and whether the end is shown",
    "claim ends": "the claim, with COMMIT and the disk",
    "act begins": "beginning the batch",
    "act ends": "the signed POST, until it is answered",
    "record ends": "recording it, with COMMIT and the disk, and showing it in Redis",
}


def main() -> None:
    """Measures, prints the tables and writes them down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # which stops what was started
    with stores.postgres() as server, receiving.receiver() as door:
        found = {name: _measured(on, door) for name, on in (("SQLite", None), ("PostgreSQL", server))}
    text = "\n\n".join([f"{machine.told()} Medians of {ROUNDS} each, or of those of them that were as usual.", *(
        _table(title, steps, {on: paths[title] for on, paths in found.items()})
        for title, steps in (("A submission", SUBMIT), ("A poll of a job that waits", POLL), ("A job", JOB),
                             ("A callback", CALLBACK)))])
    print(text)
    report.put(PAGE, "breakdown", text)


def _measured(server: Any, door: receiving.Door) -> dict[str, dict[str, float]]:
    up: Any = installations.ours(
        server, JOB_MODULES="bench.marks", CALLBACK_ALLOW="127.0.0.0/8", CALLBACK_SCHEDULE_SECONDS="0,5")
    with contextlib.closing(up):
        marks = up.folder / "marks"
        up.site.env["MARKS_FILE"] = str(marks)
        up.start_web()
        connection, requests = load.Connection(up.port), load.submissions("/jobs")
        called_back = load.post("/jobs", json.dumps({"n": 5, "callback_url": f"{door.url}/hook"}).encode())
        waits = load.get(f"/jobs/{_job_of(load.ask(connection, next(requests), 202))}")
        found = {
            "A submission": _path(marks, SUBMIT, lambda: load.ask(connection, next(requests), 202)),
            "A poll of a job that waits": _path(marks, POLL, lambda: load.ask(connection, waits, 200)),
        }
        up.start_workers()
        wait_until(lambda: up.unfinished() == 0, 60, "the submissions are worked off")
        found["A job"] = _path(marks, JOB, lambda: _until(connection, next(requests), b'"result"'))
        found["A callback"] = _path(
            marks, CALLBACK, lambda: _until(connection, called_back, b'"delivered"'), "succeed ends")
        return found


def _until(connection: load.Connection, request: bytes, said: bytes) -> None:
    """Submits, and polls without pause until the job says so."""
    poll = load.get(f"/jobs/{_job_of(load.ask(connection, request, 202))}")
    until = time.monotonic() + _PATIENCE_SECONDS
    while said not in load.ask(connection, poll, 200):
        if time.monotonic() > until:
            raise RuntimeError("not final")


def _job_of(answer: bytes) -> str:
    return str(json.loads(answer)["job_id"])


def _path(marks: Path, steps: Steps, do: Callable[[], Any], begins: str = _SENT) -> dict[str, float]:
    """The medians of how long each step took, in microseconds."""
    took: dict[str, list[float]] = {mark: [] for mark in steps}
    for number in range(_WARM_UP + ROUNDS):
        marks.write_text("")
        before = time.time()
        do()
        after = time.time()
        if number >= _WARM_UP:
            _note(took, [(before, _SENT), *_read(marks), (after, _ANSWERED), (after, _SEEN)], begins)
    whole = len(took[next(iter(steps))])
    print(f"{whole} of {ROUNDS} rounds were whole", file=sys.stderr, flush=True)
    if whole < ROUNDS / 2:
        raise RuntimeError(f"the marks of {', '.join(steps)} came in another order")
    return {mark: statistics.median(seconds) * 1e6 for mark, seconds in took.items()}


def _read(marks: Path) -> list[tuple[float, str]]:
    lines = [line.split(" ", 1) for line in marks.read_text().splitlines()]
    return sorted((float(moment), label) for moment, label in lines)


def _note(took: dict[str, list[float]], seen: list[tuple[float, str]], begins: str) -> None:
    """Adds what passed from each mark to the next one of these, when all of them are there in this order."""
    found, rest = [], iter(seen)
    for wanted in (begins, *took):
        moment = next((moment for moment, label in rest if label == wanted), None)
        if moment is None:
            return
        found.append(moment)
    for mark, before, after in zip(took, found, found[1:]):
        took[mark].append(after - before)


def _table(title: str, steps: Steps, found: dict[str, dict[str, float]]) -> str:
    rows = [f"| {title} | {', us | '.join(found)}, us |", f"| --- {'| --- ' * len(found)}|"]
    for mark, what in steps.items():
        rows.append(f"| {what} | {' | '.join(f'{each[mark]:,.0f}' for each in found.values())} |")
    rows.append(f"| together | {' | '.join(f'{sum(each.values()):,.0f}' for each in found.values())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
