"""Going on: a thread whose callback was answered well goes on in the same place with the next of the same endpoint,
several at a time: it makes them one after the other, then one transaction records them all and reserves the next."""
from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from celery import signals
from sqlalchemy import Connection

from app import backoff, circuits, db, metrics, slices, states, status, turns
from app.config import settings
from app.deliveries import Delivery
from app.group_commit import GroupCommit
from app.jobs import Job
from app.slices import Claimed, Made
from tasks import deadlines, threads

# How long a thread goes on with an endpoint before whoever is in turn gets its place: much less than one answer may
# take that is not slow, and long enough that the message which begins a slice costs little.
SECONDS = 0.25
# What is answered is recorded so much later at most, or when one answer has taken longer: a courier that is killed
# repeats no more than that.
BATCH_SECONDS = 0.05
MOST = slices.MOST  # then recording costs a fifth of sending
_OVERRUN = 2  # so many times as long as was planned, and what is left of a batch is given back
_ENDPOINTS = 64  # as many as are busy at one time; of one that is forgotten, two transactions may follow each other
_STEP_BACK_SECONDS = 1.0  # what cannot be sent now comes back after four slices


@dataclass
class Batch:
    """Deliveries that one thread makes in one place, one after the other. `begins`: it is the first of a slice, which
    came by a message; all others are reserved, to be made by `until` (`time.monotonic`)."""

    left: deque[Claimed]
    until: float = 0.0
    begins: bool = False
    made: list[Made] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Claimed | None:
        """What is to be sent now, if anything is."""
        with self._lock:
            return self.left.popleft() if self.left and (self.begins or time.monotonic() < self.until) else None

    def add(self, made: Made) -> None:
        """What was sent has been answered well."""
        with self._lock:
            self.made.append(made)

    def split(self) -> Batch:
        """Takes out everything but what is being sent now."""
        with self._lock:
            apart = Batch(self.left, self.until, made=self.made)
            self.left, self.made = deque(), []
        return apart


@dataclass(eq=False)
class _Watched:
    """A batch whose time may be over while it waits for one answer."""

    batch: Batch
    settle: Callable[[Batch], object]

    def shut(self) -> None:
        # In a thread of its own: whoever watches all deadlines waits for no database.
        apart = self.batch.split()
        threading.Thread(target=self.settle, args=(apart,), name="behind a slow answer").start()


@contextlib.contextmanager
def watched(batch: Batch, settle: Callable[[Batch], object]) -> Iterator[None]:
    """For the block: when the time of the batch is over, what one slow answer holds up, which is what was answered
    before it and what waits behind it, is given to `settle`."""
    if batch.begins:
        yield  # nothing is behind it
        return
    watch = _Watched(batch, settle)
    deadlines.add(watch, max(0.0, batch.until - time.monotonic()))
    try:
        yield
    finally:
        deadlines.remove(watch)


@dataclass(frozen=True)
class Recorded:
    """The deliveries as they were left, what is to be sent now, and until when its slice lasts (`time.monotonic`)."""

    ended: list[Delivery]
    following: list[Claimed]
    until: float | None = None


_stopping = threading.Event()


@signals.worker_shutting_down.connect
def _stop(**_: object) -> None:
    _stopping.set()


@dataclass(eq=False)
class _End:
    """The end of a batch, and what comes of it."""

    batch: Batch
    until: float | None
    stages: bool
    now: datetime
    lease: timedelta
    ended: list[tuple[Job, Delivery]] = field(default_factory=list)
    following: list[Claimed] = field(default_factory=list)
    over: float | None = None
    wakes: bool = False
    shown: list[bool] = field(default_factory=list)  # of what follows


@functools.lru_cache(maxsize=_ENDPOINTS)
def _ends_of(endpoint: str) -> GroupCommit[_End]:
    """Places of one endpoint wait for each other to record, since they count each other; so those that wait are
    recorded in one transaction, and shown in one round trip."""
    return GroupCommit(_write, _show)


def record(batch: Batch, until: float | None, stages: bool, now: datetime, lease: timedelta) -> Recorded:
    """Writes what a batch has made, gives back what it has not, and shows all of it. Unless `until` is over
    (`time.monotonic`; None: there is nothing more to make), the next are reserved in its place. `stages`: whoever is in
    turn gets the place, unless another end does that."""
    if not batch.made and not batch.left:
        return Recorded([], [])
    end = _End(batch, until, stages, now, lease)
    _ends_of(_place_of(batch).endpoint).commit(end)
    for made in batch.made:
        metrics.delivered(states.DELIVERED, made.tried.duration_seconds or None)
    return Recorded([delivery for _, delivery in end.ended], _those_shown(end), end.over)


def _place_of(batch: Batch) -> Delivery:
    return (batch.made[0].claimed if batch.made else batch.left[0]).delivery


def _write(tx: Connection, ends: Sequence[_End]) -> None:
    """Of one endpoint."""
    place, now = _place_of(ends[0].batch), max(end.now for end in ends)
    made = [each for end in ends for each in end.batch.made]
    circuit, recorded = slices.record(tx, place.endpoint, place.host, made, now)
    slices.give_back(tx, [each for end in ends for each in end.batch.left])
    if any(recorded):
        longest = max(each.tried.duration_seconds for each in made)
        circuits.note_after(tx, circuit, place.endpoint, place.host, True, longest, random.random(), now)
    in_order = iter(recorded)
    for end in ends:
        end.ended = [ours for ours in itertools.islice(in_order, len(end.batch.made)) if ours is not None]
    _go_on(tx, ends, place, now)


def _go_on(tx: Connection, ends: Sequence[_End], place: Delivery, now: datetime) -> None:
    per_host, begins = settings().callback_per_host, [end.batch.begins for end in ends]
    most = []
    for at, end in enumerate(ends):
        ours, end.over, wanted = _is_ours(end), end.until, 0
        if ours and end.over is not None:
            over = end.over - time.monotonic() < BATCH_SECONDS
            if over and _may_stay() and turns.is_next(tx, place.endpoint, place.host, per_host, now):
                end.over, begins[at] = time.monotonic() + SECONDS, True
            wanted = _how_many(end.batch.made, end.over)
        most.append(wanted)
    reserved = slices.reserve(tx, place.endpoint, place.host, most, now, now + ends[0].lease)
    for end, following, begun in zip(ends, reserved, begins):
        end.following = following
        vacant = end.stages and (_is_ours(end) or not end.batch.made) and (begun or not end.following)
        end.wakes = vacant and turns.stage_next(tx, place.host, per_host, now)


def _is_ours(end: _End) -> bool:
    return bool(end.batch.made) and len(end.ended) == len(end.batch.made)


def _may_stay() -> bool:
    """Whether nobody needs this thread: then, if nobody needs the place either, one slice follows the other."""
    return threads.are_free() and not _stopping.is_set()


def _how_many(made: Sequence[Made], until: float) -> int:
    """As many as an endpoint takes in BATCH_SECONDS that is as quick as it was; none when that is longer than what is
    left of the slice."""
    each = sum(one.tried.duration_seconds for one in made) / len(made)
    if until - time.monotonic() < BATCH_SECONDS:
        return 0
    return min(MOST, max(1, int(BATCH_SECONDS / max(each, 0.0001))))


def batch_of(following: Sequence[Claimed]) -> Batch:
    """What was reserved, as it is to be made from now on."""
    return Batch(deque(following), time.monotonic() + BATCH_SECONDS * _OVERRUN)


def _show(ends: Sequence[_End]) -> None:
    shown = iter(status.write_all(
        [*(each for end in ends for each in end.ended),
         *((one.job, one.delivery) for end in ends for one in end.following)],
        wake=any(end.wakes for end in ends)))
    for _ in itertools.chain.from_iterable(end.ended for end in ends):
        next(shown)
    for end in ends:
        end.shown = list(itertools.islice(shown, len(end.following)))


def _those_shown(end: _End) -> list[Claimed]:
    """Those that may be sent: whoever is called back reads the final state. The others step back."""
    may = [one for one, is_shown in zip(end.following, end.shown) if is_shown or has_been_forgotten(one.job, end.now)]
    if len(may) < len(end.following):
        later = end.now + timedelta(seconds=backoff.jittered(_STEP_BACK_SECONDS, random.random()))
        with db.transaction() as tx:
            for one in end.following:
                if one not in may:
                    slices.put_off(tx, one, later, end.now)
    return may


def has_been_forgotten(job: Job, now: datetime) -> bool:
    """Whether the view has had the time to forget the state before the final one."""
    assert job.finished_at is not None
    return now - job.finished_at > timedelta(seconds=status.UNFINISHED_TTL_SECONDS)
