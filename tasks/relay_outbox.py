"""The relay: the only door to the broker. What a submission hands over with its wake token is published at once;
anything else is claimed (short transaction), published (no transaction open) and marked (short transaction).

Beat starts a relay every RELAY_INTERVAL_SECONDS; each drains the outbox, and then waits for wake tokens until its
interval is over, and a little longer. So whatever becomes of a token, the next tick finds what is due.
"""
from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import clock, db, joining, outbox, presence, states, waking
from app.config import settings
from app.outbox import Row
from tasks import celery, publishing
from tasks.publishing import Batch, Publish

log = logging.getLogger("uketsuke.relay")

BATCH = 100  # few enough that a killed relay leaves little under its lease
LEASE_SECONDS = 15.0  # publishing a batch takes milliseconds; a relay that takes longer has died
# The relay of a tick listens for so much longer than until the next tick: no submission falls between two of them. Less
# than what `waking.wait` grants beyond an interval, and than an interval: two relays at once are enough.
_OVERLAP_SECONDS = 0.25
# Rows that come together are followed by others: they are waited for as long as nobody notices, since ten short jobs in
# a message take Celery no longer than one.
_GATHER_SECONDS = 0.025
_MARK_SECONDS = 0.05  # after which what nobody has claimed is marked: by then most has been
_ON_THE_WAY_SECONDS = 2.0  # a token that comes later than that after its rows were claimed is published once more
AWAY_SECONDS = 1.0  # when the broker takes nothing, all wait so long; as Celery does between tries (`tasks.broker`)
_REFUSED_SECONDS = 5.0  # when the broker takes everything but this row, it waits so long; parked after 20 s

_at_once = threading.BoundedSemaphore(2)  # a deep outbox takes many ticks; they must not take all of the threads
_working = threading.Lock()  # of the relays of this process one works, the other waits for tokens


@dataclass
class Unmarked:
    """What the broker has taken and SQL does not say yet. It waits for a later transaction: by then most of it has been
    claimed and is gone. If the process dies, rows are published once more: a repeated message is harmless."""

    rows: list[Row] = field(default_factory=list)
    since: float = 0.0  # `time.monotonic`, of the first of them
    handed: bool = False  # whether some were not claimed, so that a claim would find them

    def add(self, rows: list[Row]) -> None:
        """These were taken now."""
        self.since = self.since if self.rows else time.monotonic()
        self.rows += rows
        self.handed = self.handed or any(row.lease is None for row in rows)

    def is_due(self) -> bool:
        """Whether they are to be marked with the next claim."""
        return self.handed or bool(self.rows) and time.monotonic() - self.since >= _MARK_SECONDS

    def mark(self, tx: Connection, now: datetime) -> None:
        """→ published. All at once, so in the order in which everybody locks rows."""
        outbox.mark_published(tx, self.rows, now)

    def clear(self) -> None:
        """They were marked, and that was committed."""
        self.rows, self.handed = [], False


class Claimed:
    """What this process has claimed lately, and perhaps gets handed over too."""

    def __init__(self) -> None:
        self._lately, self._before = set[str](), set[str]()
        self._since = time.monotonic()

    def add(self, rows: list[Row]) -> None:
        if time.monotonic() - self._since > _ON_THE_WAY_SECONDS:
            self._lately, self._before, self._since = set(), self._lately, time.monotonic()
        self._lately.update(row.target_id for row in rows)

    def __contains__(self, row: Row) -> bool:
        return row.target_id in self._lately or row.target_id in self._before


_unmarked = Unmarked()
_claimed = Claimed()


def drain(
    publish: Publish, now: Callable[[], datetime] = clock.now, batch: Batch = contextlib.nullcontext,
    unmarked: Unmarked | None = None,
) -> int:
    """Publishes everything that is due; returns how many rows the broker took. Ends early when it takes none.
    `batch` surrounds the messages of one claim. The caller marks what is left `unmarked`, if it gives that."""
    published, pending = 0, Unmarked() if unmarked is None else unmarked
    while True:
        lease = secrets.token_hex(8)
        began = now()
        marks = pending.is_due()
        with db.transaction() as tx:
            if marks:
                pending.mark(tx, began)
            due = outbox.claim(tx, lease, began, began + timedelta(seconds=LEASE_SECONDS), BATCH)
        if marks:
            pending.clear()
        if not due:
            break
        _claimed.add(due)
        rows = _needed(due, lease, began)
        became = publishing.publish_all(publish, rows, batch)
        pending.add(became.taken)
        published += len(became.taken)
        done = {row.id for row in (*became.taken, *(row for row, _ in became.refused))}
        _give_back(lease, became.refused, [row.id for row in rows if row.id not in done], now())
        if became.away or len(due) < BATCH:
            break
    if unmarked is None:
        _mark(pending, now())
    return published


def pass_on(publish: Publish, handed: list[Row], batch: Batch, unmarked: Unmarked) -> tuple[int, bool]:
    """Publishes what was handed over; returns how many rows the broker took, and whether a claim must see to others.
    Nothing was claimed, so those are in the outbox as before."""
    rows = [row for row in handed if row not in _claimed]
    became = publishing.publish_all(publish, rows, batch)
    unmarked.add(became.taken)
    return len(became.taken), len(became.taken) < len(rows)


def _needed(due: list[Row], lease: str, now: datetime) -> list[Row]:
    """Those to be published. Without the database that is all of them: a needless message is harmless."""
    try:
        return joining.withdraw(due, lease, settings().callback_per_host, now)
    except (DBAPIError, PoolTimeout) as error:
        log.warning("nothing is withdrawn", extra={"error": db.reason(error)})
        return due


def _mark(unmarked: Unmarked, now: datetime) -> None:
    if unmarked.rows:
        with db.transaction() as tx:
            unmarked.mark(tx, now)
        unmarked.clear()


def _give_back(lease: str, refused: list[tuple[Row, str]], left: list[int], now: datetime) -> None:
    if not refused and not left:
        return
    with db.transaction() as tx:
        outbox.release(tx, lease, left, now + timedelta(seconds=AWAY_SECONDS))
        for row, why in refused:
            becomes = outbox.refuse(tx, lease, row, why, now + timedelta(seconds=_REFUSED_SECONDS))
            log.error("a row cannot be published", extra={
                "outbox_id": row.id, "target_id": row.target_id, "state": becomes, "error": why})
            if becomes == states.PARKED:
                log.error("the row is parked", extra={"outbox_id": row.id, "target_id": row.target_id})


@celery.task("tasks.relay_outbox")
def relay_outbox() -> None:
    """One tick: drains, then does what wake tokens say until the next tick's relay listens."""
    if not _at_once.acquire(blocking=False):
        return
    try:
        interval = settings().relay_interval_seconds
        until = time.monotonic() + interval + min(_OVERLAP_SECONDS, interval / 2)
        published = _work([[]])
        while True:
            if published > 1 and time.monotonic() < until:
                time.sleep(_GATHER_SECONDS)
                tokens = waking.take()
            else:
                tokens = waking.wait(min(_MARK_SECONDS, until - time.monotonic()))
            if not tokens:
                _mark_all()
                tokens = waking.wait(until - time.monotonic())
            if not tokens:
                return
            published = _work(tokens)
    finally:
        _at_once.release()
        _mark_all()


def _work(tokens: list[list[Row]]) -> int:
    """What these tokens ask for; returns how many rows the broker took."""
    published, claims = 0, not all(tokens)
    with _working:
        if handed := [row for rows in tokens for row in rows]:
            published, left = pass_on(publishing.publish, handed, publishing.in_one_go, _unmarked)
            claims = claims or left
        if claims:
            published += drain(publishing.publish, batch=publishing.in_one_go, unmarked=_unmarked)
            presence.relay_ran(clock.now())
    return published


def _mark_all() -> None:
    with _working:
        _mark(_unmarked, clock.now())
