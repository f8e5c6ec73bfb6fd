"""Turns: whose callback a host gets next. Attempts under way are counted in SQL, across couriers; who must wait has
no message, and the end of an attempt names who goes on."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, exists, or_, select, text

from app import circuits, outbox, states
from app.schema import deliveries, endpoints
from app.schema import outbox as outbox_table

QUEUE = "callbacks"
_hold_host = text("SELECT pg_advisory_xact_lock(hashtextextended(:host, 0))")


def hold(tx: Connection, host: str) -> None:
    """Until the transaction ends, nobody else counts or changes this host's deliveries (SQLite has one writer anyway).
    Taken before any row of theirs, so that two never wait for each other."""
    if tx.dialect.name == "postgresql":
        tx.execute(_hold_host, {"host": host})


_under_way = select(deliveries.c.endpoint).where(
    deliveries.c.host == bindparam("to_host"), deliveries.c.state == states.SENDING,
    deliveries.c.leased_until > bindparam("now"))


def has_room(
    tx: Connection, host: str, endpoint: str, per_host: int, per_endpoint: int, now: datetime,
) -> bool:
    """Whether one more attempt may begin: fewer than so many are under way to the host, and to the endpoint. The caller
    holds the host."""
    sending = list(tx.execute(_under_way, {"to_host": host, "now": now}).scalars())
    return len(sending) < per_host and sending.count(endpoint) < per_endpoint


_other = deliveries.alias("other")
_staged = exists().where(
    outbox_table.c.task == states.DELIVER_WEBHOOK, outbox_table.c.target_id == deliveries.c.id)
_due = (deliveries.c.state == states.PENDING, deliveries.c.next_attempt_at <= bindparam("now"))
_paused = exists().where(
    endpoints.c.id == deliveries.c.endpoint, endpoints.c.paused_until > bindparam("now"))
_anyone = select(deliveries.c.id).where(
    deliveries.c.host == bindparam("to_host"), *_due, ~_staged).order_by(deliveries.c.next_attempt_at).limit(1)
_waiting = (
    select(deliveries.c.id, deliveries.c.endpoint, endpoints.c.standing)
    .outerjoin(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .where(deliveries.c.host == bindparam("to_host"), *_due, ~_staged, or_(
        endpoints.c.paused_until.is_(None), endpoints.c.paused_until <= bindparam("now")))
    .order_by(deliveries.c.next_attempt_at, deliveries.c.id).limit(bindparam("most")))
_busy: Any = bindparam("busy", expanding=True)
_of_idle_endpoints = _waiting.where(deliveries.c.endpoint.not_in(_busy))
_of_busy_endpoints = _waiting.where(deliveries.c.endpoint.in_(_busy))
_standings = select(endpoints.c.id, endpoints.c.standing).where(endpoints.c.id.in_(_busy))


def next_up(tx: Connection, host: str, per_host: int, now: datetime) -> list[str]:
    """The deliveries that take the place of an attempt that has ended: the longest due, but first those of endpoints
    that have none under way. One, or as many as there is room for when nothing else is under way: those would have
    named the next. The caller holds the host, and stages them."""
    if tx.execute(_anyone, {"to_host": host, "now": now}).first() is None:
        return []
    sending = Counter(tx.execute(_under_way, {"to_host": host, "now": now}).scalars())
    if not sending:
        return _fitting(tx.execute(_of_idle_endpoints, _asked(host, now, [], per_host)).all(), per_host)
    if sending.total() >= per_host:
        return []
    found = tx.execute(_of_idle_endpoints, _asked(host, now, list(sending), 1)).all()
    if not found and (free := _with_room(tx, sending, per_host)):
        found = tx.execute(_of_busy_endpoints, _asked(host, now, free, 1)).all()
    return [row.id for row in found]


def _asked(host: str, now: datetime, busy: list[str], most: int) -> dict[str, Any]:
    return {"to_host": host, "now": now, "busy": busy, "most": most}


def _with_room(tx: Connection, sending: Counter[str], per_host: int) -> list[str]:
    standings = {row.id: row.standing for row in tx.execute(_standings, {"busy": list(sending)})}
    return [endpoint for endpoint, number in sending.items()
            if number < circuits.attempts_at_a_time(standings.get(endpoint), per_host)]


def _fitting(found: Sequence[Any], per_host: int) -> list[str]:
    begun: Counter[str] = Counter()
    chosen = []
    for delivery_id, endpoint, standing in found:
        if begun[endpoint] < circuits.attempts_at_a_time(standing, per_host):
            begun[endpoint] += 1
            chosen.append(delivery_id)
    return chosen


_earlier = exists().where(
    _other.c.endpoint == deliveries.c.endpoint, _other.c.state == states.PENDING, or_(
        _other.c.next_attempt_at < deliveries.c.next_attempt_at,
        and_(_other.c.next_attempt_at == deliveries.c.next_attempt_at, _other.c.id < deliveries.c.id)))
_is_first = select(deliveries.c.id).where(deliveries.c.id == bindparam("delivery_id"), ~_earlier)


def is_first(view: Connection, delivery_id: str) -> bool:
    """Whether no other delivery of its endpoint is due earlier: that one alone keeps a message while none may go."""
    return view.execute(_is_first, {"delivery_id": delivery_id}).first() is not None


_first = select(deliveries.c.id).where(
    deliveries.c.endpoint == bindparam("endpoint"), deliveries.c.state == states.PENDING,
    deliveries.c.next_attempt_at <= bindparam("before"),
).order_by(deliveries.c.next_attempt_at, deliveries.c.id).limit(1)


def first_of_endpoint(view: Connection, endpoint: str, before: datetime) -> str | None:
    """The delivery of this endpoint that has been due longest, of those due before then."""
    return view.execute(_first, {"endpoint": endpoint, "before": before}).scalar_one_or_none()


_sending = deliveries.alias("sending")
_overlooked = select(deliveries.c.id).where(
    deliveries.c.state == states.PENDING, deliveries.c.next_attempt_at < bindparam("before"), ~_staged, ~_earlier,
    ~_paused, ~exists().where(_sending.c.host == deliveries.c.host, _sending.c.state == states.SENDING),
).order_by(deliveries.c.next_attempt_at).limit(100)


def overlooked(view: Connection, before: datetime, now: datetime) -> list[str]:
    """Deliveries, the first of their endpoints, that have been due since then although no message, and no attempt to
    their host, is under way: at most 100."""
    return list(view.execute(_overlooked, {"before": before, "now": now}).scalars())


# --- their messages ---


def stage(tx: Connection, delivery_id: str, available_at: datetime, now: datetime) -> None:
    """Asks for the message that brings this delivery's next try."""
    outbox.stage(tx, states.DELIVER_WEBHOOK, delivery_id, QUEUE, now, available_at)


def stage_next(tx: Connection, host: str, per_host: int, now: datetime) -> None:
    """An attempt to this host has ended: stages who goes on."""
    for delivery_id in next_up(tx, host, per_host, now):
        stage(tx, delivery_id, now, now)


def stage_first(tx: Connection, endpoint: str, until: datetime, now: datetime) -> None:
    """An endpoint is left alone until then: stages the delivery that calls it again."""
    delivery_id = first_of_endpoint(tx, endpoint, until)
    if delivery_id is not None:
        stage(tx, delivery_id, until, now)


def stage_overlooked(tx: Connection, before: datetime, now: datetime) -> int:
    """Stages at most 100 deliveries that have been due since then although no message, and no attempt to their host, is
    under way; returns how many."""
    found = overlooked(tx, before, now)
    for delivery_id in found:
        stage(tx, delivery_id, now, now)
    return len(found)
