"""Deliveries: one callback of one job, and every move. Waiting is the column `next_attempt_at`; each try is a row."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Connection, bindparam, func, insert, select, update

from app import backoff, circuits, excerpts, outbox, statements, states, turns
from app.clock import isoformat
from app.config import settings
from app.ids import new_id
from app.jobs import Job, storable
from app.schema import deliveries, delivery_attempts, endpoints, guard


@dataclass(frozen=True)
class Delivery:
    """A row of `deliveries`."""

    id: str
    job_id: str
    url: str
    host: str
    endpoint: str
    state: str
    attempts: int
    next_attempt_at: datetime | None
    leased_until: datetime | None
    last_response: int | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Attempt:
    """A row of `delivery_attempts`: how one try ended. Either a response code, or an error that says why there is none
    (a response that broke off has both). The excerpt is made by `excerpts.of`."""

    delivery_id: str
    attempt: int
    at: datetime
    response_code: int | None
    error: str | None
    duration_seconds: float
    excerpt: str | None


_columns = [deliveries.c[field.name] for field in fields(Delivery)]
_attempt_columns = [delivery_attempts.c[field.name] for field in fields(Attempt)]


def _delivery(row: Any) -> Delivery | None:
    return None if row is None else Delivery(*row)


def as_document(delivery: Delivery) -> dict[str, Any]:
    """The member `callback` of a job as clients read it."""
    document: dict[str, Any] = {"status": delivery.state, "attempts": delivery.attempts}
    if delivery.next_attempt_at is not None:
        document["next_attempt_at"] = isoformat(delivery.next_attempt_at)
    if delivery.last_response is not None:
        document["last_response"] = delivery.last_response
    return document


def attempt_as_document(attempt: Attempt) -> dict[str, Any]:
    """One try as clients read it."""
    return {
        "webhook_id": attempt.delivery_id, "attempt": attempt.attempt, "at": isoformat(attempt.at),
        "response_code": attempt.response_code, "error": attempt.error,
        "duration_seconds": round(attempt.duration_seconds, 3), "excerpt": attempt.excerpt,
    }


def host_of(url: str) -> str:
    """What the limit of simultaneous attempts counts: the URL's host and port."""
    parts = urlsplit(url)
    return f"{(parts.hostname or '').rstrip('.')}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


# --- reading ---

_find = select(*_columns).where(deliveries.c.id == bindparam("delivery_id"))
_of_job = select(*_columns).where(deliveries.c.job_id == bindparam("of_job")).order_by(
    deliveries.c.created_at.desc(), deliveries.c.id.desc()).limit(1)
_attempts_of_job = (
    select(*_attempt_columns).join(deliveries, deliveries.c.id == delivery_attempts.c.delivery_id)
    .where(deliveries.c.job_id == bindparam("of_job"))
    .order_by(deliveries.c.created_at, deliveries.c.id, delivery_attempts.c.attempt))


def find(view: Connection, delivery_id: str) -> Delivery | None:
    """The delivery with this id; None when there is none."""
    return _delivery(view.execute(_find, {"delivery_id": delivery_id}).first())


def latest_of_job(view: Connection, job_id: str) -> Delivery | None:
    """A job's latest delivery; None when it has none."""
    return _delivery(view.execute(_of_job, {"of_job": job_id}).first())


def attempts_of_job(view: Connection, job_id: str) -> list[Attempt]:
    """Every try to tell a job's end, the oldest first."""
    return [Attempt(*row) for row in view.execute(_attempts_of_job, {"of_job": job_id})]


# --- moves ---


def first_attempt_at(now: datetime, chance: float) -> datetime:
    """When a job that ended now is told of for the first time."""
    return now + timedelta(seconds=backoff.jittered(settings().callback_schedule_seconds[0], chance))


_add = insert(deliveries).values(state=states.PENDING)


def add(tx: Connection, job: Job, first_attempt_at: datetime, now: datetime) -> Delivery:
    """(none) → pending, with its outbox row unless it joins a queue. The caller holds the transaction that finishes the
    job."""
    url = job.callback_url or ""
    delivery = Delivery(
        id=f"msg_{new_id(now)}", job_id=job.id, url=url, host=host_of(url), endpoint=circuits.endpoint_of(url),
        state=states.PENDING, attempts=0,
        next_attempt_at=first_attempt_at, leased_until=None, last_response=None, created_at=now, finished_at=None)
    waits = first_attempt_at <= now and turns.has_queue(tx, delivery.endpoint, now)
    tx.execute(_add, {
        "id": delivery.id, "job_id": job.id, "url": url, "host": delivery.host, "endpoint": delivery.endpoint,
        "next_attempt_at": first_attempt_at, "created_at": now})
    if not waits:
        turns.stage(tx, delivery.id, first_attempt_at, now)
    return delivery


_hasten = update(deliveries).where(
    deliveries.c.id == bindparam("delivery_id"), guard(deliveries.c.state, states.PENDING),
).values(next_attempt_at=bindparam("due")).returning(*_columns)


def hasten(tx: Connection, pending: Delivery, now: datetime) -> Delivery | None:
    """Makes the next try of a delivery that waits due now; None when it does not wait."""
    turns.hold(tx, pending.host)
    after = _delivery(tx.execute(_hasten, {"delivery_id": pending.id, "due": now}).first())
    if after is not None:
        turns.stage(tx, pending.id, now, now)
    return after


_due = (guard(deliveries.c.state, states.PENDING), deliveries.c.next_attempt_at <= bindparam("now"))
_claim = update(deliveries).where(deliveries.c.id == bindparam("delivery_id"), *_due).values(
    state=states.SENDING, attempts=deliveries.c.attempts + 1, next_attempt_at=None, leased_until=bindparam("until"),
).returning(*_columns)
_is_due = select(deliveries.c.id).where(deliveries.c.id == bindparam("delivery_id"), *_due)


def claim(
    tx: Connection, known: Delivery, now: datetime, leased_until: datetime, per_host: int, standing: str | None,
) -> Delivery | None:
    """pending → sending: claims the next attempt. None when it is not due, another sender has it, or its host has no
    room for one more attempt to an endpoint of this standing: then it waits without a message, and the end of one that
    is under way stages it (see `turns.stage_next`)."""
    turns.hold(tx, known.host)
    if tx.execute(_is_due, {"delivery_id": known.id, "now": now}).first() is None:
        return None
    outbox.settle(tx, states.DELIVER_WEBHOOK, known.id)
    room = turns.room(tx, known.host, per_host, now)
    if not room.admits(known.endpoint, standing):
        return None
    return _delivery(tx.execute(_claim, {
        "delivery_id": known.id, "now": now, "until": room.lease(leased_until)}).first())


def restage(tx: Connection, delivery_id: str, not_before: datetime, now: datetime) -> None:
    """Makes the outbox agree with a delivery that is not claimed now: one that is pending has a row for when it is due,
    but not before then; any other has none."""
    _restage(tx, _held(tx, delivery_id), delivery_id, not_before, now)


def _restage(tx: Connection, known: Delivery | None, delivery_id: str, not_before: datetime, now: datetime) -> None:
    if known is not None and known.next_attempt_at is not None:
        turns.stage(tx, delivery_id, max(known.next_attempt_at, not_before), now)
    else:
        outbox.settle(tx, states.DELIVER_WEBHOOK, delivery_id)


def put_off(tx: Connection, delivery_id: str, until: datetime, now: datetime) -> None:
    """As `restage`, for all of an endpoint until then: just the first of those that are due keeps a row. The end of its
    attempt stages others."""
    known = _held(tx, delivery_id)
    due = known is not None and known.next_attempt_at is not None and known.next_attempt_at <= now
    if due and not turns.is_first(tx, delivery_id):
        outbox.settle(tx, states.DELIVER_WEBHOOK, delivery_id)
    else:
        _restage(tx, known, delivery_id, until, now)


def _held(tx: Connection, delivery_id: str) -> Delivery | None:
    known = find(tx, delivery_id)
    if known is None:
        return None
    turns.hold(tx, known.host)
    return find(tx, delivery_id)


_record = update(deliveries).where(
    deliveries.c.id == bindparam("delivery_id"), deliveries.c.attempts == bindparam("held"),
    deliveries.c.leased_until == bindparam("until"), guard(deliveries.c.state, states.SENDING),
).values(
    state=bindparam("becomes"), attempts=bindparam("made"), next_attempt_at=bindparam("due"),
    finished_at=bindparam("ended"), leased_until=None,
    last_response=func.coalesce(bindparam("code"), deliveries.c.last_response),
).returning(*_columns)


def record(
    tx: Connection, held: Delivery, tried: Attempt, becomes: str, next_attempt_at: datetime | None, now: datetime,
) -> Delivery | None:
    """sending → `becomes`, with the row of this attempt; when that is pending, its next message is staged too.

    None, and nothing written, when the attempt is no longer this sender's.
    """
    turns.hold(tx, held.host)
    ended = None if becomes in states.UNFINISHED_DELIVERIES else now
    after = _delivery(tx.execute(_record, {
        "delivery_id": held.id, "held": held.attempts, "until": held.leased_until, "becomes": becomes,
        "made": tried.attempt, "due": next_attempt_at, "ended": ended, "code": tried.response_code}).first())
    if after is None:
        return None
    append(tx, tried)
    if next_attempt_at is not None:
        turns.stage(tx, held.id, next_attempt_at, now)
    return after


_append = statements.inserts(delivery_attempts, _attempt_columns)


def append(tx: Connection, *made: Attempt) -> None:
    """The rows of attempts."""
    values = [replace(
        tried, error=None if tried.error is None else storable(excerpts.line(tried.error))) for tried in made]
    statements.together(tx, statements.of_all(tx, _append, list(map(vars, values))))


# A hundred a look: each is ended in a transaction of its own, between which others write.
_stalled = select(*_columns).where(
    deliveries.c.state == states.SENDING, deliveries.c.leased_until < bindparam("now")
).order_by(deliveries.c.leased_until).limit(100)


def stalled(view: Connection, now: datetime) -> list[Delivery]:
    """Deliveries being sent whose lease is over: at most 100, the longest over first."""
    return [Delivery(*row) for row in view.execute(_stalled, {"now": now})]


# One look of the rescue ends so many, each in a transaction of its own: half a second at most. The next look goes on.
_overdue = select(*_columns).join(endpoints, endpoints.c.id == deliveries.c.endpoint).where(
    endpoints.c.paused_until > bindparam("now"), deliveries.c.state == states.PENDING,
    deliveries.c.next_attempt_at <= bindparam("now"), deliveries.c.created_at < bindparam("before"),
).order_by(deliveries.c.next_attempt_at).limit(100)
_give_up = update(deliveries).where(
    deliveries.c.id == bindparam("delivery_id"), deliveries.c.attempts == bindparam("made"),
    guard(deliveries.c.state, states.PENDING),
).values(
    state=states.EXHAUSTED, attempts=deliveries.c.attempts + 1, next_attempt_at=None, finished_at=bindparam("now"),
).returning(*_columns)


def overdue(view: Connection, before: datetime, now: datetime) -> list[Delivery]:
    """Deliveries of before then that wait for an endpoint that is paused: so its last attempt failed within the hour,
    whatever kept us away meanwhile. At most 100."""
    return [Delivery(*row) for row in view.execute(_overdue, {"now": now, "before": before})]


def give_up(tx: Connection, known: Delivery, why: str, now: datetime) -> Delivery | None:
    """pending → exhausted, with an attempt's row that says why none was made. None when it has moved meanwhile."""
    turns.hold(tx, known.host)
    after = _delivery(tx.execute(_give_up, {"delivery_id": known.id, "made": known.attempts, "now": now}).first())
    if after is not None:
        append(tx, Attempt(after.id, after.attempts, now, None, why, 0.0, None))
        outbox.settle(tx, states.DELIVER_WEBHOOK, known.id)
    return after
