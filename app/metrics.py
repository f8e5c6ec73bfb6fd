"""What is counted, and how Prometheus reads it. Each process writes files of its own in one folder of its machine; a
scrape adds up all of them, those of processes that have ended too.

The library names its files after process ids; here they are named after places (`slots`), which the next process takes
over with all that has been counted there: a counter never goes down, and there are never more files than processes at
one time. Nothing here ever fails its caller: where the files cannot be written, nothing is counted.
"""
from __future__ import annotations

import glob
import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import gauges, kinds, slots, states
from app.config import settings
from app.jobs import Job

log = logging.getLogger("uketsuke.metrics")

_FILE_BYTES = 256 * 1024  # written out at once: a disk that is full later cannot break a mapped file
_AGAIN_SECONDS = 60.0  # after files that could not be written; each try is a line of the log
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_JOB_SECONDS = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_NETWORK_SECONDS = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 15, 30)


@dataclass(frozen=True)
class Instrument:
    """A metric. `buckets` makes it a histogram."""

    name: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


SUBMISSIONS = Instrument("uketsuke_submissions_total", ("kind",), "Jobs accepted.")
REPLAYS = Instrument("uketsuke_replays_total", (), "First answers given again to a repeated Idempotency-Key.")
REFUSALS = Instrument("uketsuke_refusals_total", ("problem",), "Requests answered with a problem.")
ENDINGS = Instrument("uketsuke_jobs_ended_total", ("kind", "status", "error_code"), "Jobs that became final.")
WAIT = Instrument("uketsuke_job_wait_seconds", ("kind",), "From a job's submission to its first start.", _JOB_SECONDS)
RUN = Instrument("uketsuke_job_run_seconds", ("kind",), "How long an attempt ran.", _JOB_SECONDS)
PUBLISHED = Instrument(
    "uketsuke_messages_published_total", ("task",), "Messages that the broker took; one may name several jobs.")
RESCUES = Instrument(
    "uketsuke_rescues_total", ("what",), "Stalled attempts and deliveries ended, lost messages published again.")
TRIES = Instrument("uketsuke_delivery_attempts_total", ("outcome",), "Callback attempts recorded.")
TRY = Instrument("uketsuke_delivery_attempt_seconds", (), "How long a callback attempt took.", _NETWORK_SECONDS)
REQUESTS = Instrument("uketsuke_http_requests_total", ("rule", "method", "status"), "Requests answered.")
REQUEST = Instrument(
    "uketsuke_http_request_seconds", ("rule", "method"), "How long a request took.", _NETWORK_SECONDS)

COUNTED = (SUBMISSIONS, REPLAYS, REFUSALS, ENDINGS, WAIT, RUN, PUBLISHED, RESCUES, TRIES, TRY, REQUESTS, REQUEST)


# --- what happened ---


def submitted(kind: str) -> None:
    """A job was committed."""
    _count(SUBMISSIONS, kind)


def replayed() -> None:
    """A first answer was given again."""
    _count(REPLAYS)


def refused(problem: str) -> None:
    """A request was answered with this problem of the table."""
    _count(REFUSALS, problem)


def started(job: Job) -> None:
    """An attempt was claimed."""
    if job.attempt == 1 and job.started_at is not None:
        _observe(WAIT, (job.started_at - job.created_at).total_seconds(), job.kind)


def ended(job: Job, ran_seconds: float | None = None) -> None:
    """An attempt ended, or a job without one; the job is as that left it. `ran_seconds` when it is known."""
    if ran_seconds is not None:
        _observe(RUN, ran_seconds, job.kind)
    if job.final:
        _count(ENDINGS, job.kind, job.status, job.error_code or "")


def published(task: str, number: int = 1) -> None:
    """The broker took so many messages."""
    _count(PUBLISHED, task, number=number)


def rescued(what: str, number: int = 1) -> None:
    """The rescue ended a stalled `job` or `delivery`, or published a `message` again."""
    _count(RESCUES, what, number=number)


def delivered(outcome: str, seconds: float | None) -> None:
    """A callback attempt was recorded with this state of its delivery; None when nobody knows how long it took."""
    _count(TRIES, outcome)
    if seconds is not None:
        _observe(TRY, seconds)


def answered(rule: str, method: str, status: int, seconds: float) -> None:
    """A request was answered. `rule` is the route's, never the path."""
    method = method if method in _METHODS else "other"
    with _best_effort:
        counted = _known_child(REQUESTS, (rule, method, str(status)))
        if counted is not None:
            counted.inc()
            _known_child(REQUEST, (rule, method)).observe(max(0.0, seconds))


# --- the files ---

_instruments: dict[str, Any] = {}  # this process's, by name
_children: dict[tuple[str, tuple[str, ...]], Any] = {}  # those that were used, by name and labels
_lock = threading.Lock()  # of whoever makes them
_held: int | None = None  # this process's place
_off_until = 0.0


def _count(what: Instrument, *labels: str, number: int = 1) -> None:
    with _best_effort:
        if (child := _known_child(what, labels)) is not None:
            child.inc(number)


def _observe(what: Instrument, seconds: float, *labels: str) -> None:
    with _best_effort:
        if (child := _known_child(what, labels)) is not None:
            child.observe(max(0.0, seconds))


def _known_child(what: Instrument, labels: tuple[str, ...]) -> Any:
    """The instrument with these labels, which the library looks up anew each time; None while nothing is counted."""
    child = _children.get((what.name, labels))
    if child is None and (made := _made()) is not None:
        child = _children[what.name, labels] = _child(made[what.name], labels)
    return child


def _child(metric: Any, labels: tuple[str, ...]) -> Any:
    return metric.labels(*labels) if labels else metric


class _BestEffort:
    """Whatever goes wrong within: no request and no job fails for a figure."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        global _off_until
        if not isinstance(error, Exception):
            return False
        _off_until = time.monotonic() + _AGAIN_SECONDS
        log.warning("nothing is counted", extra={"error": f"{type(error).__name__}: {error}"})
        return True


_best_effort = _BestEffort()


def _made() -> dict[str, Any] | None:
    """This process's instruments; None while nothing can be counted."""
    if not _instruments and time.monotonic() >= _off_until:
        with _lock:
            if not _instruments:
                _make()
    return _instruments or None


def folder() -> Path:
    """Where this machine's processes count."""
    given = settings().prometheus_multiproc_dir
    return (given or settings().var_dir / "metrics").absolute()


def _make() -> None:
    global _held
    number, lock = slots.claim(folder())
    try:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder())
        from prometheus_client import CollectorRegistry, values

        for sort in ("counter", "histogram"):
            _prepare(folder() / f"{sort}_{number}.db")
        values.ValueClass = values.MultiProcessValue(lambda: number)
        made = {what.name: _instrument(what, CollectorRegistry()) for what in COUNTED}
        for what, labels in _known():
            _child(made[what.name], labels)
    except BaseException:
        os.close(lock)
        raise
    _held = lock
    _instruments.update(made)


def _instrument(what: Instrument, registry: Any) -> Any:
    from prometheus_client import Counter, Histogram

    if what.buckets:
        return Histogram(what.name, what.meaning, what.labels, registry=registry, buckets=what.buckets)
    return Counter(what.name, what.meaning, what.labels, registry=registry)


def _known() -> Iterable[tuple[Instrument, tuple[str, ...]]]:
    """What is shown as zero before it has happened: where the labels are known."""
    for kind in kinds.registry():
        yield from ((what, (kind,)) for what in (SUBMISSIONS, WAIT, RUN))
        yield ENDINGS, (kind, states.SUCCEEDED, "")
        yield from ((ENDINGS, (kind, states.FAILED, code)) for code in states.ERROR_CODES)
    yield from ((PUBLISHED, (task,)) for task in states.OUTBOX_TASKS)
    yield from ((TRIES, (state,)) for state in states.DELIVERY_STATES if state != states.SENDING)
    yield from ((RESCUES, (what,)) for what in ("job", "delivery", "message"))


def _prepare(file: Path) -> None:
    """Makes the file whole before anybody reads it, and anew when it is damaged."""
    if file.exists() and _whole(file):
        return
    new = file.with_suffix(".new")
    new.write_bytes(bytes(_FILE_BYTES))
    new.replace(file)


def _whole(file: Path) -> bool:
    with open(file, "rb") as kept:
        begin = kept.read(4)
    size = file.stat().st_size
    used = struct.unpack("i", begin)[0] if size >= _FILE_BYTES else -1
    return used == 0 or (8 <= used <= size and _readable([str(file)]))


def forget() -> None:
    """Gives this process's place back; what was counted there stays."""
    global _held, _off_until
    if _instruments:
        from prometheus_client import values

        values.ValueClass.close_all_files()
    _instruments.clear()
    _children.clear()
    if _held is not None:
        os.close(_held)
    _held, _off_until = None, 0.0


def _begin_child() -> None:
    """After a fork: the place is the parent's, and so is whatever a thread of it was about to do."""
    global _held, _lock
    _instruments.clear()
    _children.clear()
    _lock = threading.Lock()
    if _held is not None:
        os.close(_held)
        _held = None


os.register_at_fork(after_in_child=_begin_child)


# --- the scrape ---


def scrape(accept: str) -> tuple[bytes, str]:
    """All metrics in the form that this Accept header asks for, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_All())
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _All:
    """A collector of what all processes have counted, and of what the database and Redis say now."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        yield from sorted(_counted(), key=lambda metric: metric.name)
        for gauge, readings in gauges.read():
            family = GaugeMetricFamily(gauge.name, gauge.meaning, labels=gauge.labels)
            for labels, value in readings:
                family.add_metric(labels, value)
            yield family


def _counted() -> Iterable[Any]:
    with _best_effort:
        _made()
    files = glob.glob(f"{glob.escape(str(folder()))}/*.db")
    return _merged(files) or _merged([file for file in files if _readable([file])]) or []


def _merged(files: list[str]) -> list[Any] | None:
    from prometheus_client.multiprocess import MultiProcessCollector

    try:
        return list(MultiProcessCollector.merge(files))
    except Exception:  # a damaged file may break the library anywhere
        return None


def _readable(files: list[str]) -> bool:
    return _merged(files) is not None
