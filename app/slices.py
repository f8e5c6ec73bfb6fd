"""Slices: whoever has ended an attempt well goes on in the same place with the next delivery of the same endpoint, for
a moment. The transaction that records the one claims the other: no message, and no more attempts under way than before.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime

from sqlalchemy import Connection, and_, bindparam, delete, or_, select, update

from app import clock, states, turns
from app.deliveries import Delivery
from app.jobs import Job
from app.schema import deliveries, endpoints, jobs
from app.schema import outbox as outbox_table


@dataclass(frozen=True)
class Claimed:
    """A delivery that is being sent, and the job whose end it tells."""

    delivery: Delivery
    job: Job


_job_columns = [jobs.c[column.name] for column in fields(Job) if column.name != "as_of"]
_delivery_columns = [deliveries.c[column.name] for column in fields(Delivery)]
_message = and_(outbox_table.c.task == states.DELIVER_WEBHOOK, outbox_table.c.target_id == deliveries.c.id)
# Not a retry that has a message: it may have to step back first (`tasks.spreading`).
_next = (
    select(outbox_table.c.id, *_delivery_columns, *_job_columns)
    .join(jobs, jobs.c.id == deliveries.c.job_id).join(endpoints, endpoints.c.id == deliveries.c.endpoint)
    .outerjoin(outbox_table, _message)
    .where(deliveries.c.endpoint == bindparam("endpoint"), endpoints.c.standing == states.WELL,
           deliveries.c.state == states.PENDING, deliveries.c.next_attempt_at <= bindparam("now"),
           or_(deliveries.c.attempts == 0, outbox_table.c.id.is_(None)))
    .order_by(deliveries.c.next_attempt_at).limit(bindparam("most")))
_claim = update(deliveries).where(
    deliveries.c.id == bindparam("delivery_id"), deliveries.c.state == states.PENDING,
).values(state=states.SENDING, attempts=bindparam("made"), next_attempt_at=None, leased_until=bindparam("until"))
_settle = delete(outbox_table).where(outbox_table.c.id.in_(bindparam("rows", expanding=True)))


def claim_next(tx: Connection, endpoint: str, most: int, now: datetime, leased_until: datetime) -> list[Claimed]:
    """pending → sending: claims at most so many attempts of this endpoint, those that have been due longest, in the
    places of as many that have ended just now. None when the endpoint is not well. The caller holds the host, and has
    recorded those that ended."""
    cut, found = 1 + len(_delivery_columns), []
    for row in tx.execute(_next, {"endpoint": endpoint, "most": most, "now": now}).all():
        known = Delivery(*row[1:cut])
        found.append((row[0], Claimed(replace(
            known, state=states.SENDING, attempts=known.attempts + 1, next_attempt_at=None,
            leased_until=leased_until), Job(*row[cut:]))))
    if found:
        tx.execute(_claim, [
            {"delivery_id": claimed.delivery.id, "made": claimed.delivery.attempts, "until": leased_until}
            for _, claimed in found])
    if rows := [row_id for row_id, _ in found if row_id is not None]:
        tx.execute(_settle, {"rows": rows})
    return [claimed for _, claimed in found]


_touch = update(jobs).where(jobs.c.id.in_(bindparam("ids", expanding=True))).values(
    version=jobs.c.version + 1).returning(jobs.c.id, jobs.c.version)


def touch(tx: Connection, known: Sequence[Job]) -> dict[str, Job]:
    """As `jobs.touch`, for jobs that are final, of which nothing else changes; by their ids."""
    versions = {job_id: version for job_id, version in tx.execute(_touch, {"ids": [job.id for job in known]})}
    now = clock.now()
    return {job.id: replace(job, version=versions[job.id], as_of=now) for job in known}


_release = update(deliveries).where(
    deliveries.c.id == bindparam("delivery_id"), deliveries.c.attempts == bindparam("held"),
    deliveries.c.state == states.SENDING,
).values(state=states.PENDING, attempts=deliveries.c.attempts - 1, next_attempt_at=bindparam("due"), leased_until=None)


def release(tx: Connection, held: Delivery, not_before: datetime, now: datetime) -> None:
    """sending → pending: nothing was sent, and no attempt is used; its message comes, but not before then."""
    turns.hold(tx, held.host)
    if tx.execute(_release, {"delivery_id": held.id, "held": held.attempts, "due": not_before}).rowcount:
        turns.stage(tx, held.id, not_before, now)
