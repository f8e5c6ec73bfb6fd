"""The benchmark, side by side with what people would use instead: `make bench`, `python -m bench submit poll`.

Each measure is a module of this package with `contenders(stack)` (a run for each contender), REPEATS, TARGETS and, for
contenders that no target names, ONCE. Runs alternate, A B A B; what counts is the medians and their ratios. The outcome
goes to bench/results.json and into the tables of docs/performance.md; a run of some measures keeps the others' figures.
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

from bench import figures, machine, report
from bench.figures import Runs

RESULTS = Path(__file__).parent / "results.json"
_ORDER = ("submit", "poll", "reaction", "end_to_end", "notes", "callbacks", "growth", "memory", "start", "isolation",
          "losses")
_LOSSES = "losses"  # says what was lost, not how fast it was: no repeats, no targets


def measures() -> list[str]:
    """Those that are there."""
    return [name for name in _ORDER if (Path(__file__).parent / f"{name}.py").exists()]


def measure(module: ModuleType) -> Runs:
    """All runs of a measure, in turn."""
    once: frozenset[str] = getattr(module, "ONCE", frozenset())
    runs: Runs = {}
    with contextlib.ExitStack() as stack:
        run_of = module.contenders(stack)
        for number in range(module.REPEATS):
            for contender, run in run_of.items():
                if number and contender in once:
                    continue
                for figure, value in (found := run()).items():
                    runs.setdefault(contender, {}).setdefault(figure, []).append(value)
                _progress(f"  {number + 1}/{module.REPEATS} {contender}: {_line(found)}")
    return runs


def outcome(name: str) -> dict[str, Any]:
    """A measure, measured and judged."""
    module = importlib.import_module(f"bench.{name}")
    found: dict[str, Any] = {"at": datetime.now(timezone.utc).isoformat(timespec="seconds"), "what": module.__doc__}
    if name == _LOSSES:
        return found | {"losses": module.measure()}
    runs = measure(module)
    verdicts = [verdict for target in module.TARGETS if (verdict := figures.judge(target, runs))]
    return found | {"runs": runs, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}


def _progress(line: str) -> None:
    print(line, flush=True)


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {report.number(name, value)}" for name, value in found.items())


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
    for name in names or measures():
        began = time.monotonic()
        _progress(name)
        found = results["measures"] | {name: outcome(name) | {"seconds": round(time.monotonic() - began, 1)}}
        results["measures"] = {known: found[known] for known in _ORDER if known in found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # what is measured is kept if a later one fails
        report.write(results)
        _progress(f"  {time.monotonic() - began:.0f} s")
    print(report.targets(results))
    _progress(f"{time.monotonic() - whole:.0f} s; bench/results.json and docs/performance.md are written")


if __name__ == "__main__":
    main(sys.argv[1:])
