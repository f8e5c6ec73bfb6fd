"""The benchmark, side by side with what people would use instead: `make bench`, `python -m bench submit poll`.

Each measure is a module of this package with `contenders(stack)` (a run for each contender), REPEATS, TARGETS and, for
contenders that no target names, ONCE; those that share a fleet have `contenders(fleet)`. Runs alternate, A B A B; what
counts is the medians and their ratios. A measure whose time is used up (BUDGET) drops the repeats that are left, never
its first runs. The outcome goes to bench/results.json and into the tables of
docs/performance.md; a run of some measures keeps the others' figures.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
# Those without repeats come before them: when they take longer than they should, the others' repeats pay for it.
_FIRST = ("memory", "losses")
# How many seconds each may take: what it takes on two cores that do nothing else, and a little more. What one leaves is
# the next one's; all together leave the rest of fifteen minutes to first runs, which are never dropped.
BUDGET = {
    "memory": 120, "losses": 65, "end_to_end": 220, "notes": 58, "reaction": 55, "poll": 60, "submit": 50,
    "callbacks": 55, "growth": 95, "start": 12, "isolation": 77,
}
_LOSSES = "losses"  # says what was lost, not how fast it was: no repeats, no targets


def measures() -> list[str]:
    """Those that are there."""
    return [name for name in _ORDER if (Path(__file__).parent / f"{name}.py").exists()]


def in_time(names: Sequence[str], began: float) -> dict[str, float]:
    """These in the order in which they are run, and when each should have ended."""
    last = [name for name in _ORDER if name not in (*_FIRST, *_FLEET)]
    turns = [name for name in (*_FIRST, *_FLEET, *last) if name in names]
    return dict(zip(turns, (began + seconds for seconds in itertools.accumulate(BUDGET[name] for name in turns))))


def measure(
    module: ModuleType, where: Where, until: float = math.inf, now: Callable[[], float] = time.monotonic,
) -> Runs:
    """All runs of a measure, in turn; once each, and then as long as the next run, should it take what the one before
    took, ends in time."""
    once: frozenset[str] = getattr(module, "ONCE", frozenset())
    runs: Runs = {}
    took: dict[str, float] = {}
    run_of = module.contenders(where)
    for number, contender in itertools.product(range(module.REPEATS), run_of):
        if number and contender in once:
            continue
        began = now()
        if number and began + took[contender] > until:
            _progress(f"  its time is used up: no run {number + 1}/{module.REPEATS} of {contender}, and none after it")
            break
        found = run_of[contender]()
        took[contender] = now() - began
        for figure, value in found.items():
            runs.setdefault(contender, {}).setdefault(figure, []).append(value)
        _progress(f"  {number + 1}/{module.REPEATS} {contender}: {_line(found)}")
    return runs


def outcome(name: str, where: Where, until: float) -> dict[str, Any]:
    """A measure, measured and judged."""
    module = importlib.import_module(f"bench.{name}")
    found: dict[str, Any] = {"at": datetime.now(timezone.utc).isoformat(timespec="seconds"), "what": module.__doc__}
    if name == _LOSSES:
        return found | {"losses": module.measure()}
    runs = measure(module, where, until)
    judged = (figures.judge(target, runs) for target in module.TARGETS)
    verdicts = [dataclasses.asdict(verdict) for verdict in judged if verdict]
    return found | {"repeats": module.REPEATS, "runs": runs, "verdicts": verdicts}


def _progress(line: str) -> None:
    print(line, flush=True)


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {report.number(name, value)}" for name, value in found.items())


def _record(results: dict[str, Any], name: str, where: Where, until: float) -> None:
    """Measures, and writes it down at once: it is kept if a later one fails."""
    began = time.monotonic()
    _progress(name)
    outcome_of = outcome(name, where, until) | {"seconds": round(time.monotonic() - began, 1)}
    found = results["measures"] | {name: outcome_of}
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
    order = in_time(names or measures(), whole).items()
    for together, turns in itertools.groupby(order, lambda turn: turn[0] in _FLEET):
        with contextlib.ExitStack() as shared:
            where = fleet.Fleet(shared) if together else None
            for name, until in turns:
                with contextlib.ExitStack() as alone:
                    _record(results, name, where or alone, until)
    print(report.targets(results))
    _progress(f"{time.monotonic() - whole:.0f} s; bench/results.json and docs/performance.md are written")


if __name__ == "__main__":
    main(sys.argv[1:])
