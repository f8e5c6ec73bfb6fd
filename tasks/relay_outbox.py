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
from tasks.publishing import Batch, Outcome, Publish

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
AWAY_SECONDS = 1.0  # when the broker takes nothing, all wait so long; as Celery does between tries (`tasks.broker`)
_REFUSED_SECONDS = 5.0  # when the broker takes everything but this row, it waits so long; parked after 20 s

_two_relays = threading.BoundedSemaphore(2)  # a deep outbox takes many ticks; they must not take all of the threads


@dataclass
class Unmarked:
    """What the broker has taken and SQL does not say yet. It waits for a later transaction of its relay: by then most
    of it has been claimed and is gone. If the relay dies its lease runs out: a repeated message is harmless."""

    rows: list[Row] = field(default_factory=list)
    since: float = 0.0  # `time.monotonic`, of the first of them

    def add(self, rows: list[Row]) -> None:
        """These were taken now."""
        self.since = self.since if self.rows else time.monotonic()
        self.rows += rows

    def is_due(self) -> bool:
        """Whether enough time has passed."""
        return bool(self.rows) and time.monotonic() - self.since >= _MARK_SECONDS

    def mark(self, tx: Connection, now: datetime) -> None:
        """leased → published."""
        outbox.mark_published(tx, self.rows, now)

    def clear(self) -> None:
        """They were marked, and that was committed."""
        self.rows = []


def drain(
    publish: Publish, now: Callable[[], datetime] = clock.now, batch: Batch = contextlib.nullcontext,
    unmarked: Unmarked | None = None,
) -> int:
    """Publishes everything that is due; returns how many rows the broker took. Ends early when it takes none.
    `batch` surrounds the messages of one claim. The caller marks what is left `unmarked`, if it gives that."""
    published, pending = 0, Unmarked() if unmarked is None else unmarked
    while True:
        lease, due = _claim(pending, now())
        if not due:
            break
        became = publishing.publish_all(publish, _needed(due, lease, now()), batch)
        pending.add(became.taken)
        published += len(became.taken)
        _give_back(lease, became, now())
        if became.left or len(due) < BATCH:
            break
    if unmarked is None:
        _mark(pending, now())
    return published


def pass_on(
    publish: Publish, tokens: list[list[Row]], now: Callable[[], datetime], batch: Batch, unmarked: Unmarked,
) -> int:
    """Publishes what these tokens hand over, as long as it is left to us; returns how many rows the broker took. The
    lease of the others ends soon, and then they are claimed."""
    began = now()
    rows = [row for rows in tokens for row in rows if waking.has_time(row, began)]
    taken = publishing.publish_all(publish, rows, batch).taken if rows else []
    unmarked.add(taken)
    return len(taken)


def _claim(pending: Unmarked, now: datetime) -> tuple[str, list[Row]]:
    """What is due, under a lease of this name. Marks what is to be marked in the same transaction."""
    lease, marks = secrets.token_hex(8), pending.is_due()
    with db.transaction() as tx:
        if marks:
            pending.mark(tx, now)
        due = outbox.claim(tx, lease, now, now + timedelta(seconds=LEASE_SECONDS), BATCH)
    if marks:
        pending.clear()
    return lease, due


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


def _give_back(lease: str, became: Outcome, now: datetime) -> None:
    if not became.refused and not became.left:
        return
    with db.transaction() as tx:
        outbox.release(tx, lease, [row.id for row in became.left], now + timedelta(seconds=AWAY_SECONDS))
        for row, why in became.refused:
            becomes = outbox.refuse(tx, lease, row, why, now + timedelta(seconds=_REFUSED_SECONDS))
            log.error("a row cannot be published", extra={
                "outbox_id": row.id, "target_id": row.target_id, "state": becomes, "error": why})
            if becomes == states.PARKED:
                log.error("the row is parked", extra={"outbox_id": row.id, "target_id": row.target_id})


@celery.task("tasks.relay_outbox")
def relay_outbox() -> None:
    """One tick: drains, then does what wake tokens say until the next tick's relay listens."""
    if not _two_relays.acquire(blocking=False):
        return
    unmarked = Unmarked()
    try:
        interval = settings().relay_interval_seconds
        until = time.monotonic() + interval + min(_OVERLAP_SECONDS, interval / 2)
        tokens = [[], *waking.take()]
        while tokens:
            published = _work(tokens, unmarked)
            if published > 1 and time.monotonic() < until:
                time.sleep(_GATHER_SECONDS)
                tokens = waking.take()
            else:
                tokens = waking.wait(min(_MARK_SECONDS, until - time.monotonic()))
            if not tokens or unmarked.is_due():
                _mark(unmarked, clock.now())
            tokens = tokens or waking.wait(until - time.monotonic())
    finally:
        _two_relays.release()
        _mark(unmarked, clock.now())


def _work(tokens: list[list[Row]], unmarked: Unmarked) -> int:
    """What these tokens ask for; returns how many rows the broker took."""
    published = pass_on(publishing.publish, tokens, clock.now, publishing.in_one_go, unmarked)
    if not all(tokens):  # something else is due
        published += drain(publishing.publish, batch=publishing.in_one_go, unmarked=unmarked)
        presence.relay_ran(clock.now())
    return published
