"""Who joins a queue of callbacks needs no message: the end of the attempt before names who goes on (`turns`)."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, or_, select, text

from app import states, turns
from app.outbox import Row
from app.schema import deliveries, endpoints
from app.schema import outbox as outbox_table

_try_to_hold_host = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:host, 0))")
# First attempts alone, which never step back: a retry that comes late may (`tasks.spreading`).
_waiting = (
    select(deliveries.c.id, deliveries.c.host, deliveries.c.endpoint, endpoints.c.standing)
    .outerjoin(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .where(deliveries.c.id.in_(bindparam("ids", expanding=True)), deliveries.c.state == states.PENDING,
           deliveries.c.attempts == 0, deliveries.c.next_attempt_at <= bindparam("now"),
           or_(endpoints.c.paused_until.is_(None), endpoints.c.paused_until <= bindparam("now"))))
_withdraw = delete(outbox_table).where(outbox_table.c.id.in_(bindparam("rows", expanding=True)))


def withdraw(tx: Connection, rows: Sequence[Row], per_host: int, now: datetime) -> list[Row]:
    """Of outbox rows that have just been claimed, those that are to be published. The others are gone: their deliveries
    wait for the end of an attempt to their endpoint, which is under way, or is to be published here."""
    callbacks = {row.target_id: row for row in rows if row.task == states.DELIVER_WEBHOOK}
    if len(callbacks) <= per_host:
        return list(rows)
    of_host: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for found in tx.execute(_waiting, {"ids": list(callbacks), "now": now}):
        of_host[found.host][found.id] = found
    needless: set[int] = set()
    for host, waiting in of_host.items():
        if len(waiting) > per_host and _hold(tx, host):
            in_order = [waiting[target] for target in callbacks if target in waiting]
            needless |= {callbacks[target].id for target in _joining(tx, host, in_order, per_host, now)}
    if needless:
        tx.execute(_withdraw, {"rows": sorted(needless)})
    return [row for row in rows if row.id not in needless]


def _hold(tx: Connection, host: str) -> bool:
    """As `turns.hold`, unless somebody else holds it: that one may wait for a row that is claimed here."""
    return tx.dialect.name != "postgresql" or bool(tx.execute(_try_to_hold_host, {"host": host}).scalar_one())


def _joining(tx: Connection, host: str, waiting: list[Any], per_host: int, now: datetime) -> list[str]:
    """Those for which there is no room now, although there is something under way to their endpoint."""
    free, joining = turns.room(tx, host, per_host, now), []
    for found in waiting:
        if free.admits(found.endpoint, found.standing):
            free.begin(found.endpoint, found.standing)
        elif free.sending[found.endpoint]:
            joining.append(found.id)
    return joining
