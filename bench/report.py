"""The tables of docs/performance.md, made from the results and put between markers."""
from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import figures
from bench.figures import few

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_TARGETS, _FIGURES, _LOSSES = "targets", "figures", "losses"


def write(results: dict[str, Any]) -> None:
    """Replaces what is between the markers of the page."""
    page = PAGE.read_text()
    page = between(page, _TARGETS, f"{head(results)}\n\n{targets(results)}")
    page = between(page, _FIGURES, all_figures(results))
    page = between(page, _LOSSES, losses(results))
    PAGE.write_text(page)


def put(file: Path, name: str, text: str, of: str = "bench") -> None:
    """Replaces what is between the two markers of this name in a file. Raises as `between` does."""
    file.write_text(between(file.read_text(), name, text, of))


def between(page: str, name: str, text: str, of: str = "bench") -> str:
    """The page with this text between the two markers of this name. Raises ValueError when they are not there."""
    begin, end = f"<!-- {of}: {name} -->", f"<!-- /{of}: {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def head(results: dict[str, Any]) -> str:
    """What it was measured on, and when."""
    on = results["machine"]
    minutes = sum(measure["seconds"] for measure in results["measures"].values()) / 60
    days = sorted({measure["at"][:10] for measure in results["measures"].values()})
    return (f"Measured {' and '.join(days)} on {on['cores']} cores of {on['processor']}, {on['kernel']}, Python "
            f"{on['python']}, SQLite {on['sqlite']}; an fsync took {on['fsync']}. All measures took "
            f"{minutes:.0f} minutes. {on['libraries']}.")


def targets(results: dict[str, Any]) -> str:
    """What had to be reached, and what was."""
    rows = [_row("what", "figure", "ours", "", "against", "", "ratio", "must be", ""), _row(*["---"] * 9)]
    for measure in results["measures"].values():
        rows += [_verdict(verdict, measure.get("repeats", 0)) for verdict in measure.get("verdicts", ())]
    return "\n".join(rows)


def _verdict(verdict: dict[str, Any], repeats: int) -> str:
    target, figure = verdict["target"], verdict["target"]["figure"]
    absolute = target["peer"] is None
    bound = f">= {_bound(target['at_least'], figure, absolute)}" if target["at_least"] is not None else (
        f"<= {_bound(target['at_most'], figure, absolute)}")
    how = (few(verdict.get("runs", repeats), repeats), "noise" * verdict["noise"])
    said = ", ".join(["reached" if verdict["reached"] else "**missed**", *filter(None, how)])
    return _row(
        target["what"], words(figure), target["ours"], number(figure, verdict["ours"]), target["peer"] or "",
        "" if absolute else number(figure, verdict["peer"]), "" if absolute else f"{verdict['value']:.2f}", bound, said)


def _bound(value: float, figure: str, absolute: bool) -> str:
    return number(figure, value) if absolute else f"{value:g}"


def all_figures(results: dict[str, Any]) -> str:
    """A table a measure: medians of all contenders."""
    parts = []
    for name, measure in results["measures"].items():
        if "runs" in measure:
            what = " ".join(measure["what"].split())
            parts.append(f"### {name.replace('_', ' ').capitalize()}\n\n{what}\n\n{_medians(measure)}")
    return "\n\n".join(parts)


def _medians(measure: dict[str, Any]) -> str:
    runs: figures.Runs = measure["runs"]
    named = list(dict.fromkeys(figure for found in runs.values() for figure in found))
    rows = [_row("", *map(words, named)), _row(*["---"] * (len(named) + 1))]
    for contender, found in runs.items():
        how_many = few(min(map(len, found.values())), measure.get("repeats", 0))
        told = f"{contender} ({how_many})" if how_many else contender
        rows.append(_row(told, *(_cell(name, found.get(name)) for name in named)))
    return "\n".join(rows)


def _cell(figure: str, values: list[float] | None) -> str:
    if not values:
        return ""
    return number(figure, statistics.median(values)) + (" noise" if figures.is_noise(values) else "")


def losses(results: dict[str, Any]) -> str:
    """What was lost to kill -9."""
    found = results["measures"].get("losses")
    if found is None:
        return ""
    rows = [_row("", "accepted", "still run after `kill -9` of web and store",
                 "a job whose worker got `kill -9` runs again"), _row(*["---"] * 4)]
    for one in found["losses"]:
        again = one["again_seconds"]
        said = f"after {again:.0f} s" if again is not None else f"not within {one['waited_seconds']:.0f} s"
        rows.append(_row(one["contender"], str(one["accepted"]), str(one["kept"]), said))
    return "\n".join(rows)


def words(figure: str) -> str:
    """`requests_per_second` as a person would write it."""
    for ending, unit in (("_per_second", "/s"), ("_ms", ", ms"), ("_seconds", ", s"), ("_mib", ", MiB")):
        figure = figure.removesuffix(ending) + unit if figure.endswith(ending) else figure
    return figure.replace("_", " ")


def number(figure: str, value: float) -> str:
    """With as many digits as say something."""
    if value >= 100 or (figure.endswith("_per_second") and value >= 10):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
