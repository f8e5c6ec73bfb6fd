"""Turns: whose callback a host gets next. Attempts under way are counted in SQL, across couriers; who must wait has
no message, and the end of an attempt names who goes on."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, and_, bindparam, exists, or_, select, text

from app import circuits, outbox, statements, states
from app.schema import deliveries, endpoints
from app.schema import outbox as outbox_table

QUEUE = "callbacks"
_hold_host = text("SELECT pg_advisory_xact_lock(hashtextextended(:host, 0))")


def hold(tx: Connection, host: str) -> None:
    """Until the transaction ends, nobody else counts or changes this host's deliveries (SQLite has one writer anyway).
    Taken before any row of theirs, so that two never wait for each other."""
    for statement, values in holding(tx, host):
        statements.rows(tx, statement, values)


def holding(tx: Connection, host: str) -> list[tuple[Any, dict[str, Any]]]:
    """What `hold` asks for, to be asked together with what comes next."""
    return [(_hold_host, {"host": host})] if tx.dialect.name == "postgresql" else []


@dataclass
class Room:
    """What is under way to one host, and what may begin beside it. Deliveries of one lease are made one after the
    other, in one place."""

    per_host: int
    sending: Counter[str] = field(default_factory=Counter)  # places, by endpoint
    not_well: int = 0
    last_lease: datetime | None = None

    def admits(self, endpoint: str, standing: str | None) -> bool:
        """Whether one more attempt may begin. Endpoints that are not well leave one place to those that are, if there
        is more than one."""
        return (self.sending.total() < self.per_host
                and self.sending[endpoint] < circuits.attempts_at_a_time(standing, self.per_host)
                and (standing == states.WELL or self.not_well < max(1, self.per_host - 1)))

    def begin(self, endpoint: str, standing: str | None) -> None:
        """One more is under way."""
        self.sending[endpoint] += 1
        self.not_well += standing != states.WELL

    def lease(self, until: datetime) -> datetime:
        """A lease for one more place, which no other place has."""
        return lease_after(self.last_lease, until)


def lease_after(last: datetime | None, until: datetime) -> datetime:
    """A lease until then, or a moment later: after the last one of the same host, so that it tells a place."""
    return until if last is None else max(until, last + timedelta(microseconds=1))


_under_way = (
    select(deliveries.c.endpoint, endpoints.c.standing, deliveries.c.leased_until)
    .outerjoin(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .where(deliveries.c.host == bindparam("to_host"), deliveries.c.state == states.SENDING,
           deliveries.c.leased_until > bindparam("now")))


def room(tx: Connection, host: str, per_host: int, now: datetime) -> Room:
    """What this host has room for. The caller holds the host."""
    places = {tuple(row) for row in tx.execute(_under_way, {"to_host": host, "now": now})}
    found = Room(per_host, last_lease=max((leased_until for *_, leased_until in places), default=None))
    for endpoint, standing, _ in places:
        found.begin(endpoint, standing)
    return found


_other = deliveries.alias("other")
_host_is_busy = exists().where(_other.c.host == deliveries.c.host, _other.c.state == states.SENDING)
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
_well = endpoints.c.standing == states.WELL
_idle = deliveries.c.endpoint.not_in(_busy)
# Who goes on: first who has nothing under way, and of these who is well, lest sick ones take every place that is free.
_IN_TURN = (_waiting.where(_idle, _well), _waiting.where(_idle), _waiting.where(~_idle, _well), _waiting.where(~_idle))


def next_up(tx: Connection, host: str, per_host: int, now: datetime) -> list[str]:
    """The deliveries that take the place of an attempt that has ended, in turn, the longest due first. One, or as many
    as there is room for when nothing else is under way: those would have named the next. The caller holds the host, and
    stages them."""
    if tx.execute(_anyone, {"to_host": host, "now": now}).first() is None:
        return []
    free = room(tx, host, per_host, now)
    if free.sending.total() >= per_host:
        return []
    most = 1 if free.sending else per_host
    asked = {"to_host": host, "now": now, "busy": list(free.sending), "most": per_host}
    chosen: list[str] = []
    for question in _IN_TURN:
        for delivery_id, endpoint, standing in tx.execute(question, asked).all():
            if delivery_id not in chosen and free.admits(endpoint, standing):
                free.begin(endpoint, standing)
                chosen.append(delivery_id)
            if len(chosen) == most:
                return chosen
    return chosen


def is_next(tx: Connection, endpoint: str, host: str, per_host: int, now: datetime) -> bool:
    """Whether whoever is in turn at this host is of this endpoint. The caller holds the host."""
    found = next_up(tx, host, per_host, now)
    return bool(found) and tx.execute(_others, {"ids": found, "endpoint": endpoint}).first() is None


_others = select(deliveries.c.id).where(
    deliveries.c.id.in_(bindparam("ids", expanding=True)), deliveries.c.endpoint != bindparam("endpoint"))
_earlier = exists().where(
    _other.c.endpoint == deliveries.c.endpoint, _other.c.state == states.PENDING, or_(
        _other.c.next_attempt_at < deliveries.c.next_attempt_at,
        and_(_other.c.next_attempt_at == deliveries.c.next_attempt_at, _other.c.id < deliveries.c.id)))
_is_first = select(deliveries.c.id).where(deliveries.c.id == bindparam("delivery_id"), ~_earlier)


def is_first(view: Connection, delivery_id: str) -> bool:
    """Whether no other delivery of its endpoint is due earlier: that one alone keeps a message while none may go."""
    return view.execute(_is_first, {"delivery_id": delivery_id}).first() is not None


_is_first_staged = select(_staged).where(
    deliveries.c.endpoint == bindparam("endpoint"), *_due, _host_is_busy,
).order_by(deliveries.c.next_attempt_at, deliveries.c.id).limit(1)


def has_queue(tx: Connection, endpoint: str, now: datetime) -> bool:
    """Whether deliveries of this endpoint wait without a message for the end of an attempt, so that one more may wait
    behind them. Never said on PostgreSQL, where who ends the last attempt and who joins may not see each other."""
    if tx.dialect.name != "sqlite":
        return False
    return tx.execute(_is_first_staged, {"endpoint": endpoint, "now": now}).scalar_one_or_none() is False


_first = select(deliveries.c.id).where(
    deliveries.c.endpoint == bindparam("endpoint"), deliveries.c.state == states.PENDING,
    deliveries.c.next_attempt_at <= bindparam("before"),
).order_by(deliveries.c.next_attempt_at, deliveries.c.id).limit(1)


def first_of_endpoint(view: Connection, endpoint: str, before: datetime) -> str | None:
    """The delivery of this endpoint that has been due longest, of those due before then."""
    return view.execute(_first, {"endpoint": endpoint, "before": before}).scalar_one_or_none()


# A hundred a look, in one transaction that is short: they were forgotten, and more is the next look's.
_overlooked = select(deliveries.c.id).where(
    deliveries.c.state == states.PENDING, deliveries.c.next_attempt_at < bindparam("before"), ~_staged, ~_earlier,
    ~_paused, ~_host_is_busy,
).order_by(deliveries.c.next_attempt_at).limit(100)


def overlooked(view: Connection, before: datetime, now: datetime) -> list[str]:
    """Deliveries, the first of their endpoints, that have been due since then although no message, and no attempt to
    their host, is under way: at most 100."""
    return list(view.execute(_overlooked, {"before": before, "now": now}).scalars())


# --- their messages ---


def stage(tx: Connection, delivery_id: str, available_at: datetime, now: datetime) -> None:
    """Asks for the message that brings this delivery's next try."""
    outbox.stage(tx, states.DELIVER_WEBHOOK, delivery_id, QUEUE, now, available_at)


def stage_next(tx: Connection, host: str, per_host: int, now: datetime) -> bool:
    """An attempt to this host has ended: stages who goes on; returns whether there is anybody."""
    found = next_up(tx, host, per_host, now)
    for delivery_id in found:
        stage(tx, delivery_id, now, now)
    return bool(found)


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
