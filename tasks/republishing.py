"""Messages that got lost are published again, batch after batch, for a part of a tick of the rescue."""
from __future__ import annotations

import logging
import time
from datetime import datetime

from sqlalchemy import Connection

from app import db, jobs, metrics, outbox, states, waking
from app.config import settings

log = logging.getLogger("uketsuke.rescue")

# In one transaction, as many as the relay claims: SQLite's other writers wait for some milliseconds, and the first
# messages are out while the next ones are looked for.
BATCH = 100
# Of a tick, for all queues: half of the default interval, so that no rescue is late with what else it does, nor counts
# as away. The next tick goes on with what is left; workers have thousands of messages until then.
LONGEST_SECONDS = 2.5


def seconds_of_a_tick() -> float:
    """For how long a tick may republish."""
    return min(LONGEST_SECONDS, settings().rescue_interval_seconds / 2)


def republish(queue: str, before: datetime, now: datetime, seconds: float) -> tuple[int, bool]:
    """Republishes what was published before then and is not being moved, the oldest first: one batch, and more for as
    long; returns how many, and whether more of it is left. Wakes the relay for each batch: slots are free."""
    until, total = time.monotonic() + seconds, 0
    while True:
        with db.transaction() as tx:
            found = outbox.published_before(tx, queue, before, BATCH)
            moving = jobs.moving(tx, [row.target_id for row in found if row.task == states.RUN_JOB])
            lost = [row for row in found if row.target_id not in moving]
            goes_on = _republish(tx, queue, lost, now)
        _tell(queue, lost)
        total += len(lost)
        if len(found) < BATCH or not goes_on:
            return total, False
        if time.monotonic() >= until:
            return total, True


def _republish(tx: Connection, queue: str, lost: list[outbox.Row], now: datetime) -> bool:
    """Whether those behind them should follow at once. A job's message that got lost before, and none of whose queue
    was claimed since, may wait for a consumer that takes nothing: it gets a batch a tick, not a backlog."""
    if not lost:  # all are being moved: by the next tick most have been
        return False
    outbox.republish(tx, [row.id for row in lost], now)
    first_of = {row.target_id: row.published_at for row in lost if row.task == states.RUN_JOB and row.published_at}
    if not first_of or jobs.note_all_published(tx, first_of):
        return True
    last = jobs.last_started(tx, queue)
    return last is not None and last[0] > min(first_of.values())


def _tell(queue: str, lost: list[outbox.Row]) -> None:
    if lost:
        waking.relay()
        metrics.rescued("message", len(lost))
    for row in lost:
        log.warning("lost message, published again", extra={
            "outbox_id": row.id, "task": row.task, "target_id": row.target_id, "queue": queue})
