"""Who joins a queue of callbacks needs no message: the end of the attempt before names who goes on (`turns`)."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, or_, select

from app import db, states, turns
from app.outbox import Row
from app.schema import deliveries, endpoints
from app.schema import outbox as outbox_table

# First attempts alone, which never step back: a retry that comes late may (`tasks.spreading`).
_waiting = (
    select(deliveries.c.id, deliveries.c.host, deliveries.c.endpoint, endpoints.c.standing)
    .outerjoin(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .where(deliveries.c.id.in_(bindparam("ids", expanding=True)), deliveries.c.state == states.PENDING,
           deliveries.c.attempts == 0, deliveries.c.next_attempt_at <= bindparam("now"),
           deliveries.c.next_attempt_at >= deliveries.c.created_at,  # not what is set apart (`slices`)
           or_(endpoints.c.paused_until.is_(None), endpoints.c.paused_until <= bindparam("now"))))
_withdraw = delete(outbox_table).where(
    outbox_table.c.id.in_(bindparam("rows", expanding=True)), outbox_table.c.state == states.LEASED,
    outbox_table.c.lease == bindparam("by"))


def withdraw(rows: Sequence[Row], lease: str, per_host: int, now: datetime) -> list[Row]:
    """Of outbox rows that this lease holds, those that are to be published. The others are gone: their deliveries wait
    for the end of an attempt to their endpoint, which is under way, or is to be published here."""
    callbacks = {row.target_id: row for row in rows if row.task == states.DELIVER_WEBHOOK}
    if len(callbacks) <= per_host:
        return list(rows)
    with db.reading() as view:
        hosts = Counter(found.host for found in _read(view, list(callbacks), now))
    needless: set[int] = set()
    for host in (host for host, waiting in hosts.items() if waiting > per_host):
        with db.transaction() as tx:
            turns.hold(tx, host)  # before any row, as all do; so whoever ends an attempt sees what is withdrawn here
            waiting = {found.id: found for found in _read(tx, list(callbacks), now) if found.host == host}
            in_order = [waiting[target] for target in callbacks if target in waiting]
            joining = {callbacks[target].id for target in _joining(tx, host, in_order, per_host, now)}
            if joining:
                tx.execute(_withdraw, {"rows": sorted(joining), "by": lease})
        needless |= joining
    return [row for row in rows if row.id not in needless]


def _read(view: Connection, ids: list[str], now: datetime) -> list[Any]:
    return list(view.execute(_waiting, {"ids": ids, "now": now}))


def _joining(tx: Connection, host: str, waiting: list[Any], per_host: int, now: datetime) -> list[str]:
    """Those for which there is no room now, although there is something under way to their endpoint."""
    free, joining = turns.room(tx, host, per_host, now), []
    for found in waiting:
        if free.admits(found.endpoint, found.standing):
            free.begin(found.endpoint, found.standing)
        elif free.sending[found.endpoint]:
            joining.append(found.id)
    return joining
