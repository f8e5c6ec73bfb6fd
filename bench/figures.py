"""What the runs of a measure say: medians, whether they agree, and whether a target is reached."""
from __future__ import annotations

import statistics
from dataclasses import dataclass

NOISE = 0.2  # runs that are further apart than this part of their median say little

Runs = dict[str, dict[str, list[float]]]  # contender -> figure -> one value a run


@dataclass(frozen=True)
class Target:
    """What a figure of ours must reach: a ratio to a peer's, or without a peer the figure itself."""

    what: str  # as the table calls it
    figure: str
    ours: str
    peer: str | None = None
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A target and what came of it."""

    target: Target
    ours: float
    peer: float | None
    value: float  # the ratio, or the figure itself
    reached: bool
    noise: bool
    runs: int  # of the one that has fewer


def spread(values: list[float]) -> float:
    """How far the runs are apart, as a part of their median; 0 for a single one."""
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def is_noise(values: list[float]) -> bool:
    """Whether the runs disagree too much to say more than an order of magnitude. A single one cannot tell."""
    return spread(values) > NOISE


def few(number: int, repeats: int) -> str:
    """How many runs a figure has, when that must be said: one cannot disagree, and two agree more easily than three."""
    return "once" if number == 1 else f"{number} runs" if number < repeats else ""


def judge(target: Target, runs: Runs) -> Verdict | None:
    """None when one of the two was not measured."""
    ours = runs.get(target.ours, {}).get(target.figure)
    peer = runs.get(target.peer, {}).get(target.figure) if target.peer else None
    if not ours or (target.peer and not peer):
        return None
    mine, theirs = statistics.median(ours), statistics.median(peer) if peer else None
    value = mine / theirs if theirs else mine
    reached = (target.at_least is None or value >= target.at_least) and (
        target.at_most is None or value <= target.at_most)
    noise = is_noise(ours) or bool(peer and is_noise(peer))
    return Verdict(target, mine, theirs, value, reached, noise, min(len(ours), len(peer or ours)))
