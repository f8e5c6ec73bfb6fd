"""What one machine does, and what more processes change: `python -m bench.scaling`, with our own processes on each pair
of database and broker. Each row is measured with the web and worker processes that it names; runs alternate, each on an
installation of its own while PostgreSQL and RabbitMQ are up, and what counts is the medians. In a run: the reaction of
single jobs, trivial jobs and notes end to end, then, with the workers stopped, submissions over 16 connections. The
tables are printed, and put into docs/scaling.md. JOBS, NOTES, REACTIONS, SECONDS and REPEATS make it smaller.
"""
from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import asking, end_to_end, installations, machine, processors, rabbitmq, report, stores
from bench.rabbitmq import RabbitMQ
from tests import servers

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
SQLITE, POSTGRESQL, RABBITMQ = "SQLite, Valkey", "PostgreSQL, Valkey", "PostgreSQL, RabbitMQ"
_WORKERS_OF = {1: (2,), 2: (1, 2, 4)}  # by web processes; every other pair would cost as much again and tell little
_AS_INSTALLED = (2, 2)  # of which it is told who takes what of the processors
_JOBS, _NOTES, _REACTIONS, _REPEATS = (
    int(os.environ.get(name, default)) for name, default in (
        ("JOBS", 2000), ("NOTES", 1000), ("REACTIONS", 100), ("REPEATS", 3)))
_SECONDS = float(os.environ.get("SECONDS", 1.5))  # of submissions
# The columns: a figure, and how a person calls it.
_RATES = {"requests_per_second": "submissions/s", "submit idle": "idle meanwhile", "jobs_per_second": "jobs/s",
          "jobs idle": "idle meanwhile", "notes_per_second": "notes/s", "p50_ms": "reaction p50, ms"}
_PARTS = {"web": "web", "worker": "worker's parent", "worker child": "its children", "courier": "courier",
          "beat": "beat", "redis": "Valkey", "postgres": "PostgreSQL", "rabbitmq": "RabbitMQ", "the load": "the load"}

Row = tuple[str, int, int]  # what it runs on, web processes, worker processes
Found = dict[Row, dict[str, list[float]]]


def main() -> None:
    """Measures, prints the tables and writes them down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # which stops what was started
    found: Found = {}
    with stores.postgres() as server, rabbitmq.running() as rabbit:
        for number in range(_REPEATS):
            for on in (SQLITE, POSTGRESQL, *[RABBITMQ] * (rabbit is not None)):
                for web in _WORKERS_OF:
                    _run(found, on, web, None if on == SQLITE else server, rabbit if on == RABBITMQ else None)
            print(f"{number + 1}/{_REPEATS}", file=sys.stderr, flush=True)
    text = f"{_head()}\n\n{rates(found)}\n\n{_processor(found)}"
    print(text)
    report.put(PAGE, "figures", text, of="scaling")


def _run(found: Found, on: str, web: int, server: servers.Postgres | None, rabbit: RabbitMQ | None) -> None:
    """One run of all rows with so many web processes."""
    broker = {} if rabbit is None else {"BROKER_URL": rabbit.url}
    up: Any = installations.ours(server, WEB_WORKERS=web, **broker)
    with contextlib.closing(up):
        up.start_web()
        for workers in _WORKERS_OF[web]:
            up.site.env["WORKER_CONCURRENCY"] = str(workers)
            up.start_workers()
            asking.finished_job(up)
            _note(found, (on, web, workers), _with_workers(up, rabbit))
            up.kill("workers")
        submitted: dict[str, float] = {}
        with processors.idle(submitted, "submit idle"):
            figures = asking.loaded(up, "submit", seconds=_SECONDS)
        submitted["requests_per_second"] = figures["requests_per_second"]
        for workers in _WORKERS_OF[web]:
            _note(found, (on, web, workers), submitted)
    if rabbit is not None:
        rabbit.empty()


def _note(found: Found, row: Row, values: dict[str, float]) -> None:
    told = {name: round(value, 2) for name, value in values.items() if name in _RATES}
    print(*row, told, file=sys.stderr, flush=True)
    for name, value in values.items():
        found.setdefault(row, {}).setdefault(name, []).append(value)


def _with_workers(up: Any, rabbit: RabbitMQ | None) -> dict[str, float]:
    found = {"p50_ms": asking.loaded(up, "react", count=_REACTIONS)["p50_ms"]}
    before = processors.used(up, rabbit)
    with processors.idle(found, "jobs idle"):
        found |= end_to_end.worked_off(up, "/jobs", _JOBS)
    after = processors.used(up, rabbit)
    found |= {f"{part} ms": (after[part] - before.get(part, 0.0)) * 1000 / _JOBS for part in after}
    return found | {"notes_per_second": end_to_end.worked_off(up, "/notes", _NOTES)["jobs_per_second"]}


def _head() -> str:
    return (f"{machine.told()} Medians of {_REPEATS} runs: {_JOBS:,} jobs, {_NOTES:,} notes, {_REACTIONS} reactions, "
            f"{_SECONDS:g} s of submissions.")


def rates(found: Found) -> str:
    """The first table: medians."""
    lines = [_line("on", "web processes", "worker processes", *_RATES.values()), _line(*["---"] * (len(_RATES) + 3))]
    for row, values in found.items():
        lines.append(_line(*map(str, row), *(_cell(name, values[name]) for name in _RATES)))
    if not any(row[0] == RABBITMQ for row in found):
        lines.append(_line(RABBITMQ, "rabbitmq-server is not installed", *[""] * (len(_RATES) + 1)))
    return "\n".join(lines)


def _processor(found: Found) -> str:
    """Who takes what, as it is installed."""
    rows = {row[0]: values for row, values in found.items() if row[1:] == _AS_INSTALLED}
    lines = [_line("processor time a job, ms", *_PARTS.values(), "all"), _line(*["---"] * (len(_PARTS) + 2))]
    for on, values in rows.items():
        each = {part: statistics.median(values[f"{part} ms"]) for part in _PARTS if f"{part} ms" in values}
        lines.append(_line(on, *(f"{each[part]:.2f}" if part in each else "" for part in _PARTS),
                           f"{sum(each.values()):.2f}"))
    return "\n".join(lines)


def _cell(name: str, values: list[float]) -> str:
    value = statistics.median(values)
    return f"{value:.0%}".replace("%", " %") if name.endswith("idle") else report.number(name, value)


def _line(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


if __name__ == "__main__":
    main()
