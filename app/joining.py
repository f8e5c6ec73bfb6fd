"""Who joins a queue of callbacks needs no message: the end of the attempt before names who goes on (`turns`)."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, or_, select

from app import db, states, turns
from app.outbox import Row
from app.schema import deliveries, endpoints, guard
from app.schema import outbox as outbox_table

_MOST = 1000  # rows that one transaction takes along; deleting them takes some ten milliseconds
# First attempts alone, which never step back: a retry that comes late may (`tasks.spreading`).
_may_join = (
    deliveries.c.state == states.PENDING, deliveries.c.attempts == 0, deliveries.c.next_attempt_at <= bindparam("now"),
    deliveries.c.next_attempt_at >= deliveries.c.created_at)  # not what is set apart (`slices`)
_waiting = (
    select(deliveries.c.id, deliveries.c.host, deliveries.c.endpoint, endpoints.c.standing)
    .outerjoin(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .where(deliveries.c.id.in_(bindparam("ids", expanding=True)), *_may_join, or_(
        endpoints.c.paused_until.is_(None), endpoints.c.paused_until <= bindparam("now"))))
_behind = (
    select(outbox_table.c.id).join(deliveries, deliveries.c.id == outbox_table.c.target_id)
    .where(outbox_table.c.task == states.DELIVER_WEBHOOK, guard(outbox_table.c.state, states.WAITING),
           deliveries.c.endpoint == bindparam("endpoint"), *_may_join)
    .order_by(deliveries.c.next_attempt_at).limit(bindparam("most"))
    .with_for_update(of=outbox_table, skip_locked=True).cte("behind"))
_withdraw_behind = delete(outbox_table).where(outbox_table.c.id.in_(select(_behind.c.id)))
_withdraw = delete(outbox_table).where(
    outbox_table.c.id.in_(bindparam("rows", expanding=True)), outbox_table.c.state == states.LEASED,
    outbox_table.c.lease == bindparam("by"))


def withdraw(rows: Sequence[Row], lease: str, per_host: int, now: datetime) -> list[Row]:
    """Of outbox rows that this lease holds, those that are to be published. The others are gone, with those that would
    follow them: their deliveries wait for the end of an attempt to their endpoint, which is under way, or is to be
    published here."""
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
            found = _joining(tx, host, in_order, per_host, now)
            joining = {callbacks[target].id for target in found}
            if joining:
                tx.execute(_withdraw, {"rows": sorted(joining), "by": lease})
            for endpoint in sorted({waiting[target].endpoint for target in found}):  # no room for those behind, either
                tx.execute(_withdraw_behind, {"endpoint": endpoint, "now": now, "most": _MOST})
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
