"""What the benchmark says of its own runs: ratios, noise, answers that are not the expected ones, the page's tables."""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import breakdown, figures, load, marks, report, scaling
from bench.__main__ import BUDGET, in_time, measure, measures
from bench.figures import Target

FASTER = Target("submit", "requests_per_second", "ours", "peer", at_least=1.0)


@contextlib.contextmanager
def answering(*parts: bytes, requests: int = 10**6) -> Iterator[int]:
    """A server that gives so many answers on each connection, of these bytes, in so many pieces; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(ConnectionError):
                for _ in range(requests):
                    if not connection.recv(65536):
                        break
                    for part in parts:
                        connection.sendall(part)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                    threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)


def test_a_load_counts_the_answers_that_it_was_asked_for() -> None:
    with answering(b"HTTP/1.1 202 Accepted\r\nContent-Le", b"ngth: 4\r\n\r\nab", b"cd") as port:
        figures_of = load.apart("submit", "--port", port, "--count", 50, "--connections", 4)
    assert figures_of["answered"] == 50
    assert 0 < figures_of["p50_ms"] <= figures_of["p99_ms"] <= figures_of["max_ms"]
    assert figures_of["requests_per_second"] > 0


def test_a_connection_may_be_closed_once_its_last_answer_is_there() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd", requests=1) as port:
        assert load.apart("poll", "--port", port, "--count", 3, "--connections", 3)["answered"] == 3


def test_a_connection_that_is_closed_instead_of_an_answer_stops_the_load() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd", requests=1) as port:
        with pytest.raises(RuntimeError, match="closed by the server|Connection reset"):
            load.apart("poll", "--port", port, "--count", 6, "--connections", 3)


def test_a_load_stops_at_an_answer_that_is_not_the_expected_one() -> None:
    with answering(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy") as port:
        with pytest.raises(RuntimeError, match="503 instead of 202: b'busy'"):
            load.apart("submit", "--port", port, "--count", 5)


def test_a_load_stops_when_no_answer_comes() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd") as port:
        with pytest.raises(RuntimeError, match="no answer within 0.2 s"):
            load.apart("poll", "--port", port, "--count", 5, "--patience", 0.2)


def test_a_target_is_judged_by_the_ratio_of_medians() -> None:
    runs = {"ours": {"requests_per_second": [90.0, 100.0, 95.0]}, "peer": {"requests_per_second": [100.0, 99.0, 101.0]}}
    verdict = figures.judge(FASTER, runs)
    assert verdict is not None
    assert (verdict.value, verdict.reached, verdict.noise) == (0.95, False, False)


def test_runs_that_disagree_by_more_than_a_fifth_are_noise() -> None:
    runs = {"ours": {"requests_per_second": [100.0, 130.0, 105.0]}, "peer": {"requests_per_second": [100.0]}}
    verdict = figures.judge(FASTER, runs)
    assert verdict is not None
    assert (verdict.reached, verdict.noise) == (True, True)
    assert not figures.is_noise([100.0, 120.0, 100.0, 119.0, 118.0])


def test_a_target_without_a_peer_is_judged_by_the_figure_itself() -> None:
    verdict = figures.judge(Target("start", "seconds", "ours", at_most=3.0), {"ours": {"seconds": [3.1]}})
    assert verdict is not None
    assert (verdict.value, verdict.reached) == (3.1, False)


def test_a_target_whose_peer_was_not_measured_has_no_verdict() -> None:
    assert figures.judge(FASTER, {"ours": {"requests_per_second": [1.0]}}) is None


@pytest.mark.parametrize(("page", "of", "name"), [
    *((report.PAGE, "bench", name) for name in ("targets", "losses", "breakdown", "servers", "figures")),
    (scaling.PAGE, "scaling", "figures"),
])
def test_the_page_has_a_place_for_each_table(page: Path, of: str, name: str, tmp_path: Path) -> None:
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    for _ in range(2):
        report.put(copy, name, "the table", of)
        before, found, after = copy.read_text().partition(f"<!-- {of}: {name} -->\nthe table\n<!-- /{of}: {name} -->")
        assert found and page.read_text().startswith(before) and page.read_text().endswith(after)


def test_a_broker_that_is_not_installed_is_named_in_the_table() -> None:
    names = ("requests_per_second", "jobs_per_second", "notes_per_second", "p50_ms")
    rates = dict.fromkeys(names, [100.0, 300.0, 200.0])
    shares = dict.fromkeys(("submit idle", "jobs idle"), [0.1])
    told = scaling.rates({(scaling.SQLITE, 2, 2): {**rates, **shares}}).splitlines()
    assert told[2:] == ["| SQLite, Valkey | 2 | 2 | 200 | 10 % | 200 | 10 % | 200 | 200 |",
                        "| PostgreSQL, RabbitMQ | rabbitmq-server is not installed | | | | | | | |"]
    assert len({line.count("|") for line in told}) == 1


def test_the_measures_share_fifteen_minutes_and_leave_some_of_them() -> None:
    assert set(BUDGET) == set(measures())
    assert sum(BUDGET.values()) <= 14.5 * 60


def test_each_measure_has_what_those_before_it_have_left() -> None:
    ends = in_time(["submit", "growth", "memory", "end_to_end"], 1000.0)
    assert list(ends) == ["memory", "end_to_end", "submit", "growth"]
    assert ends["memory"] == 1000 + BUDGET["memory"]
    assert ends["growth"] == 1000 + sum(BUDGET[name] for name in ends)
    assert list(in_time(measures(), 0.0)) == list(BUDGET)


class Taking:
    """A measure whose runs take so many seconds of a clock of its own; each finds one more request a second."""

    def __init__(self, repeats: int = 3, once: frozenset[str] = frozenset(), **seconds: float) -> None:
        self.REPEATS, self.ONCE, self.seconds, self.now = repeats, once, seconds, 0.0

    def contenders(self, where: Any) -> dict[str, Callable[[], dict[str, float]]]:
        def run(name: str) -> dict[str, float]:
            self.now += self.seconds[name]
            return {"requests_per_second": 100.0}

        return {name: lambda name=name: run(name) for name in self.seconds}  # type: ignore[misc]

    def measured(self, until: float) -> dict[str, int]:
        """How many runs each gets."""
        with contextlib.ExitStack() as where:
            runs = measure(self, where, until, lambda: self.now)  # type: ignore[arg-type]
        return {name: len(found["requests_per_second"]) for name, found in runs.items()}


@pytest.mark.parametrize(("until", "runs"), [
    (60, {"ours": 3, "peer": 3, "seldom": 1}), (59, {"ours": 3, "peer": 2, "seldom": 1}),
    (43, {"ours": 2, "peer": 2, "seldom": 1}), (40, {"ours": 2, "peer": 1, "seldom": 1}),
    (12, {"ours": 1, "peer": 1, "seldom": 1}), (0, {"ours": 1, "peer": 1, "seldom": 1}),
])
def test_repeats_that_would_not_end_in_time_are_dropped(
    until: float, runs: dict[str, int], capsys: pytest.CaptureFixture[str],
) -> None:
    taking = Taking(once=frozenset({"seldom"}), ours=3, peer=16, seldom=3)
    assert taking.measured(until) == runs
    assert ("its time is used up: no run" in capsys.readouterr().out) is (runs["peer"] < 3)
    assert taking.now <= max(until, 22)  # a first run of each


def test_the_tables_say_how_many_runs_a_figure_has() -> None:
    runs = {name: {"requests_per_second": [100.0] * number} for name, number in (("ours", 3), ("peer", 2), ("one", 1))}
    results = {"measures": {"submit": {"repeats": 3, "what": "", "runs": runs, "verdicts": [
        dataclasses.asdict(verdict) for peer in ("ours", "peer", "one") if (verdict := figures.judge(
            dataclasses.replace(FASTER, peer=peer), runs)) is not None]}}}
    told = report.all_figures(results)
    assert "| ours | 100 |" in told and "| peer (2 runs) | 100 |" in told and "| one (once) | 100 |" in told
    assert [line.split(" | ")[-1] for line in report.targets(results).splitlines()[2:]] == [
        "reached |", "reached, 2 runs |", "reached, once |"]


def test_every_mark_is_left_by_a_function_of_ours() -> None:
    left = {"write", "shown"}
    for named in (marks._WEB, marks._TASKS):
        for module, names in named.items():
            assert all(callable(getattr(importlib.import_module(module), name)) for name in names)
            left |= {name.strip("_") for name in names}
    for steps in (breakdown.SUBMIT, breakdown.POLL, breakdown.JOB, breakdown.CALLBACK):
        ours = {mark.rpartition(" ")[0] for mark in steps if " " in mark}
        assert ours <= left


def test_what_passes_between_marks_is_told_of_whole_paths_only() -> None:
    took: dict[str, list[float]] = {"a begins": [], "b ends": []}
    whole = [(1.0, "sent"), (2.0, "b ends"), (3.0, "a begins"), (5.0, "other"), (7.0, "b ends")]
    breakdown._note(took, whole, "sent")
    breakdown._note(took, whole[:3], "sent")
    assert took == {"a begins": [2.0], "b ends": [4.0]}
