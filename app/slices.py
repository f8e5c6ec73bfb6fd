"""Slices: whoever has ended attempts well goes on in the same place with the next deliveries of the same endpoint, for
a moment. The transaction that records the ones reserves the others: no message, and no more attempts under way than
before.

What is reserved is `sending` under one lease, which names the place, and uses no attempt: that is counted when it is
recorded. So of those whose sender dies before they are sent nothing is used up.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, exists, func, or_, select, update

from app import at_once, circuits, deliveries, statements, states, turns
from app.circuits import Circuit
from app.deliveries import Attempt, Delivery
from app.jobs import Job
from app.schema import deliveries as table
from app.schema import delivery_attempts, endpoints, guard, jobs
from app.schema import outbox as outbox_table


@dataclass(frozen=True)
class Claimed:
    """A delivery that is being sent, the job whose end it tells, and which attempt it is. `due` is when it fell due, if
    it is reserved: then its row does not count this attempt yet."""

    delivery: Delivery
    job: Job
    attempt: int
    due: datetime | None = None


@dataclass(frozen=True)
class Made:
    """An attempt that was answered well, and not recorded yet."""

    claimed: Claimed
    tried: Attempt


def claimed(held: Delivery, job: Job) -> Claimed:
    """What was claimed by a message: its attempt is counted already."""
    return Claimed(held, job, held.attempts)


# --- reserving ---

MOST = at_once.MOST_TOUCHED  # that one place has at a time
# Who has been staged so lately, two ticks of the relay, may be on the way by a message, which opens another place: it
# goes last here.
_ON_THE_WAY_SECONDS = 2.0
_ROOM_FOR_THOSE = 8  # few have a message: the others wait for the end of an attempt (`joining`)
_ids = statements.listed(table.c.id, "id", MOST)
_job_columns = [jobs.c[column.name] for column in fields(Job) if column.name != "as_of"]
_delivery_columns = [table.c[column.name] for column in fields(Delivery)]
_message = and_(outbox_table.c.task == states.DELIVER_WEBHOOK, outbox_table.c.target_id == table.c.id)
_place = table.alias("place")
_last_lease = select(func.max(_place.c.leased_until)).where(
    _place.c.host == bindparam("to_host"), _place.c.state == states.SENDING).scalar_subquery()
# Not a retry that has a message: it may have to step back first (`tasks.spreading`). Nor what is `set_apart`.
_next = (
    select(_last_lease, outbox_table.c.id, outbox_table.c.available_at, *_delivery_columns, *_job_columns)
    .join(jobs, jobs.c.id == table.c.job_id).join(endpoints, endpoints.c.id == table.c.endpoint)
    .outerjoin(outbox_table, _message)
    .where(table.c.endpoint == bindparam("endpoint"), endpoints.c.standing == states.WELL,
           table.c.state == states.PENDING, table.c.next_attempt_at <= bindparam("now"),
           table.c.next_attempt_at >= table.c.created_at,
           or_(table.c.attempts == 0, outbox_table.c.id.is_(None)))
    .order_by(table.c.next_attempt_at).limit(bindparam("most")))
_reserve = update(table).where(_ids, guard(table.c.state, states.PENDING)).values(
    state=states.SENDING, next_attempt_at=None, leased_until=bindparam("until"))
# In the order of their ids, as everybody who holds several.
_messages = (
    select(outbox_table.c.id).where(outbox_table.c.id.in_(bindparam("rows", expanding=True)))
    .order_by(outbox_table.c.id).with_for_update().cte("messages"))
_settle = delete(outbox_table).where(outbox_table.c.id.in_(select(_messages.c.id)))


def reserve(
    tx: Connection, endpoint: str, host: str, most: Sequence[int], now: datetime, leased_until: datetime,
) -> list[list[Claimed]]:
    """pending → sending: reserves at most so many deliveries of this endpoint, those that have been due longest, for
    each of these places; those for which a message was staged a moment ago only when there are no others. None when the
    endpoint is not well. The caller holds the host, and has recorded what was in the places."""
    if not any(most):
        return [[] for _ in most]
    asked = {"endpoint": endpoint, "to_host": host, "most": sum(most) + _ROOM_FOR_THOSE, "now": now}
    staged_since = now - timedelta(seconds=_ON_THE_WAY_SECONDS)
    rows = sorted(statements.rows(tx, _next, asked), key=lambda row: row[2] is not None and row[2] > staged_since)
    rows = rows[:sum(most)]
    found, following, last = list[list[Claimed]](), iter(rows), rows[0][0] if rows else None
    for number in most:
        last = turns.lease_after(last, leased_until)
        found.append([_reserved(row, last) for row in itertools.islice(following, number)])
    statements.together(tx, *((_reserve, {
        **_listing([one.delivery.id for one in place]), "until": place[0].delivery.leased_until,
    }) for place in found if place))
    if messages := [row[1] for row in rows if row[1] is not None]:
        tx.execute(_settle, {"rows": messages})
    return found


def _reserved(row: statements.Row, leased_until: datetime) -> Claimed:
    cut = 3 + len(_delivery_columns)
    known = Delivery(*row[3:cut])
    return Claimed(
        replace(known, state=states.SENDING, next_attempt_at=None, leased_until=leased_until), Job(*row[cut:]),
        known.attempts + 1, known.next_attempt_at)


def _listing(ids: Sequence[str]) -> dict[str, Any]:
    return statements.listing("id", ids, MOST)


# --- recording ---

_deliver = update(table).where(
    _ids, table.c.attempts == bindparam("held"), table.c.leased_until == bindparam("until"),
    guard(table.c.state, states.SENDING),
).values(
    state=states.DELIVERED, attempts=bindparam("made"), last_response=bindparam("code"), finished_at=bindparam("now"),
    leased_until=None).returning(table.c.id)


def record(
    tx: Connection, endpoint: str, host: str, made: Sequence[Made], now: datetime,
) -> tuple[Circuit | None, list[tuple[Job, Delivery] | None]]:
    """Holds this host; then sending → delivered, with the rows of these attempts, of those that are still their
    sender's. Returns how the endpoint stood; and of each its job, and it, as they are now, or None."""
    groups = [(key, list(alike)) for key, alike in groupby(sorted(made, key=_order), key=_key)]
    delivering = [(_deliver, {
        **_listing([one.tried.delivery_id for one in alike]), "held": held, "until": until, "made": number,
        "code": code, "now": now}) for (held, until, number, code), alike in groups]
    holding = turns.holding(tx, host)
    found = statements.together(tx, *holding, circuits.finding(endpoint), *delivering)
    standing, *delivered = found[len(holding):]
    ours = {(*key, *row) for (key, _), rows in zip(groups, delivered) for row in rows}
    is_ours = [(*_key(one), one.tried.delivery_id) in ours for one in made]
    kept = [one for one, is_kept in zip(made, is_ours) if is_kept]
    told = _append(tx, kept) if kept else {}
    return circuits.found(standing), [
        (told[one.claimed.job.id], _delivered(one, now)) if is_kept else None for one, is_kept in zip(made, is_ours)]


def _append(tx: Connection, kept: Sequence[Made]) -> dict[str, Job]:
    deliveries.append(tx, *(one.tried for one in kept))
    return at_once.touch(tx, [one.claimed.job for one in kept])


def _delivered(one: Made, now: datetime) -> Delivery:
    return replace(
        one.claimed.delivery, state=states.DELIVERED, attempts=one.tried.attempt, next_attempt_at=None,
        leased_until=None, last_response=one.tried.response_code, finished_at=now)


def _key(one: Made) -> tuple[Any, ...]:
    held = one.claimed.delivery
    return held.attempts, held.leased_until, one.tried.attempt, one.tried.response_code


def _order(one: Made) -> tuple[Any, ...]:
    return tuple(map(str, _key(one)))


# --- giving back ---

_give_back = update(table).where(
    table.c.id == bindparam("delivery_id"), table.c.attempts == bindparam("held"),
    table.c.leased_until == bindparam("until"), guard(table.c.state, states.SENDING),
).values(state=states.PENDING, next_attempt_at=bindparam("due"), leased_until=None)


def give_back(tx: Connection, reserved: Iterable[Claimed]) -> None:
    """sending → pending, due as they were: they wait without a message. The caller holds the host, and stages whoever
    goes on."""
    if back := [_values(one.delivery, one.due) for one in reserved]:
        tx.execute(_give_back, back)


def put_off(tx: Connection, reserved: Claimed, until: datetime, now: datetime) -> None:
    """sending → pending: it cannot be sent now; its message comes then."""
    turns.hold(tx, reserved.delivery.host)
    if tx.execute(_give_back, _values(reserved.delivery, until)).rowcount:
        turns.stage(tx, reserved.delivery.id, until, now)


def set_apart(tx: Connection, held: Delivery, now: datetime) -> bool:
    """sending → pending, of a delivery that was reserved and whose sender has died: its message comes now, and it goes
    alone, so that what may have killed its sender is counted the next time. It is known by being due since before it
    was made, which nothing else is. False when it has moved meanwhile."""
    turns.hold(tx, held.host)
    gone = tx.execute(_give_back, _values(held, held.created_at - timedelta(microseconds=1))).rowcount == 1
    if gone:
        turns.stage(tx, held.id, now, now)
    return gone


def _values(held: Delivery, due: datetime | None) -> dict[str, Any]:
    return {"delivery_id": held.id, "held": held.attempts, "until": held.leased_until, "due": due}


_has_row = select(exists().where(
    delivery_attempts.c.delivery_id == bindparam("delivery_id"), delivery_attempts.c.attempt == bindparam("number")))


def is_reserved(view: Connection, held: Delivery) -> bool:
    """Whether a delivery that is being sent does not count this attempt yet: the one that it has counted last is over.
    """
    return held.attempts == 0 or bool(
        view.execute(_has_row, {"delivery_id": held.id, "number": held.attempts}).scalar_one())
