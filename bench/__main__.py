"""The benchmark, side by side with what people would use instead: `make bench`, `python -m bench submit poll`.

Each measure is a module of this package with `contenders(stack)` (a run for each contender), REPEATS, TARGETS and, for
contenders that no target names, ONCE; those that share a fleet have `contenders(fleet)`. Runs alternate, A B A B; what
counts is the medians and their ratios. The outcome goes to bench/results.json and into the tables of
docs/performance.md; a run of some measures keeps the others' figures.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import figures, fleet, machine, report
from bench.figures import Runs

Where = fleet.Fleet | contextlib.ExitStack  # what a measure's contenders live in
RESULTS = Path(__file__).parent / "results.json"
_ORDER = ("submit", "poll", "reaction", "end_to_end", "notes", "callbacks", "growth", "memory", "start", "isolation",
          "losses")
# Those that share one fleet, in the order in which they are run: first while the workers are up, then without them.
_FLEET = ("end_to_end", "notes", "reaction", "poll", "submit")
# How many seconds each may take on two cores that do nothing else: fifteen minutes in all.
BUDGET = {
    "end_to_end": 200, "notes": 65, "reaction": 45, "poll": 65, "submit": 65, "callbacks": 60, "growth": 110,
    "memory": 115, "start": 20, "isolation": 80, "losses": 75,
}
_LOSSES = "losses"  # says what was lost, not how fast it was: no repeats, no targets


def measures() -> list[str]:
    """Those that are there."""
    return [name for name in _ORDER if (Path(__file__).parent / f"{name}.py").exists()]


def measure(module: ModuleType, where: Where) -> Runs:
    """All runs of a measure, in turn."""
    once: frozenset[str] = getattr(module, "ONCE", frozenset())
    runs: Runs = {}
    run_of = module.contenders(where)
    for number in range(module.REPEATS):
        for contender, run in run_of.items():
            if number and contender in once:
                continue
            for figure, value in (found := run()).items():
                runs.setdefault(contender, {}).setdefault(figure, []).append(value)
            _progress(f"  {number + 1}/{module.REPEATS} {contender}: {_line(found)}")
    return runs


def outcome(name: str, where: Where) -> dict[str, Any]:
    """A measure, measured and judged."""
    module = importlib.import_module(f"bench.{name}")
    found: dict[str, Any] = {"at": datetime.now(timezone.utc).isoformat(timespec="seconds"), "what": module.__doc__}
    if name == _LOSSES:
        return found | {"losses": module.measure()}
    runs = measure(module, where)
    verdicts = [verdict for target in module.TARGETS if (verdict := figures.judge(target, runs))]
    return found | {"runs": runs, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}


def _progress(line: str) -> None:
    print(line, flush=True)


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {report.number(name, value)}" for name, value in found.items())


def _record(results: dict[str, Any], name: str, where: Where) -> None:
    """Measures, and writes it down at once: it is kept if a later one fails."""
    began = time.monotonic()
    _progress(name)
    found = results["measures"] | {name: outcome(name, where) | {"seconds": round(time.monotonic() - began, 1)}}
    results["measures"] = {known: found[known] for known in _ORDER if known in found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    report.write(results)
    _progress(f"  {time.monotonic() - began:.0f} s of {BUDGET[name]} s")


def _stop(*_: Any) -> None:
    raise SystemExit("stopped")  # which stops what was started


def main(names: list[str]) -> None:
    """Measures these, or all."""
    signal.signal(signal.SIGTERM, _stop)
    if unknown := set(names) - set(measures()):
        sys.exit(f"no such measure: {', '.join(sorted(unknown))}; there are {', '.join(measures())}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"measures": {}}
    results["machine"] = machine.describe()
    whole = time.monotonic()
    asked = names or measures()
    with contextlib.ExitStack() as stack:
        shared = fleet.Fleet(stack)
        for name in _FLEET:
            if name in asked:
                _record(results, name, shared)
    for name in asked:
        if name not in _FLEET:
            with contextlib.ExitStack() as stack:
                _record(results, name, stack)
    print(report.targets(results))
    _progress(f"{time.monotonic() - whole:.0f} s; bench/results.json and docs/performance.md are written")


if __name__ == "__main__":
    main(sys.argv[1:])
