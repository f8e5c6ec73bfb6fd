"""What is kept for how long: finished jobs become tombstones, tombstones and old keys go."""
from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, exists, insert, or_, select, tuple_

from app import states
from app.config import settings
from app.errors import Expired
from app.schema import deliveries, delivery_attempts, endpoints, idempotency_keys, jobs, outbox, tombstones

BATCH = 500  # rows a transaction: a prune never holds up a submission for long; so many jobs take 20 ms

_telling = exists().where(deliveries.c.job_id == jobs.c.id, or_(
    deliveries.c.state.in_(sorted(states.UNFINISHED_DELIVERIES)),
    and_(deliveries.c.state == states.EXHAUSTED, deliveries.c.finished_at > bindparam("kept_since"))))
_expired = (
    select(jobs.c.id, jobs.c.owner, jobs.c.kind, jobs.c.status, jobs.c.finished_at, jobs.c.expires_at)
    .where(jobs.c.expires_at <= bindparam("now"), ~_telling)
    .order_by(jobs.c.expires_at).limit(BATCH).with_for_update(skip_locked=True, of=jobs))
_ids: Any = bindparam("ids", expanding=True)
_their_deliveries = select(deliveries.c.id).where(deliveries.c.job_id.in_(_ids))


def _kept_since(now: datetime) -> datetime:
    return now - timedelta(seconds=settings().result_ttl_seconds)


def is_kept_for(delivery_state: str, finished_at: datetime | None, now: datetime) -> bool:
    """Whether an expired job is kept for such a delivery: one that is under way, or was exhausted less than
    `result_ttl_seconds` ago, and may be asked for again."""
    if delivery_state in states.UNFINISHED_DELIVERIES:
        return True
    return delivery_state == states.EXHAUSTED and finished_at is not None and finished_at > _kept_since(now)


def bury_expired_jobs(tx: Connection, now: datetime) -> list[str]:
    """final and expired → tombstone: at most BATCH jobs with all that hangs on them; returns their ids.

    A job whose callback `is_kept_for` is kept with it (its readers get 410 all the same).
    """
    rows = tx.execute(_expired, {"now": now, "kept_since": _kept_since(now)}).all()
    if not rows:
        return []
    ids = {"ids": [row.id for row in rows]}
    tx.execute(insert(tombstones), [
        {"job_id": row.id, "owner": row.owner, "kind": row.kind, "status": row.status,
         "finished_at": row.finished_at, "expired_at": row.expires_at} for row in rows])
    tx.execute(delete(delivery_attempts).where(delivery_attempts.c.delivery_id.in_(_their_deliveries)), ids)
    tx.execute(delete(outbox).where(
        outbox.c.task == states.DELIVER_WEBHOOK, outbox.c.target_id.in_(_their_deliveries)), ids)
    tx.execute(delete(deliveries).where(deliveries.c.job_id.in_(_ids)), ids)
    tx.execute(delete(jobs).where(jobs.c.id.in_(_ids)), ids)
    return [row.id for row in rows]


_old_tombstones = select(tombstones.c.job_id).where(tombstones.c.expired_at <= bindparam("before")).limit(BATCH)
_row = (idempotency_keys.c.owner, idempotency_keys.c.key)
_readable = exists().where(jobs.c.id == idempotency_keys.c.job_id)
_old_keys = select(*_row).where(idempotency_keys.c.created_at <= bindparam("before"), ~_readable).limit(BATCH)


def forget_tombstones(tx: Connection, before: datetime) -> int:
    """tombstone → gone: at most BATCH of those that expired before then; returns how many."""
    ids = list(tx.execute(_old_tombstones, {"before": before}).scalars())
    tx.execute(delete(tombstones).where(tombstones.c.job_id.in_(_ids)), {"ids": ids})
    return len(ids)


def forget_keys(tx: Connection, before: datetime) -> int:
    """Frees at most BATCH keys that were used before then and whose job is gone; returns how many."""
    return tx.execute(delete(idempotency_keys).where(tuple_(*_row).in_(_old_keys)), {"before": before}).rowcount


_old_endpoints = select(endpoints.c.id).where(endpoints.c.noted_at <= bindparam("before")).limit(BATCH)


def forget_endpoints(tx: Connection, before: datetime) -> int:
    """Forgets at most BATCH endpoints whose standing has not changed since then: an attempt will note it anew. Returns
    how many."""
    return tx.execute(delete(endpoints).where(endpoints.c.id.in_(_old_endpoints)), {"before": before}).rowcount


_find_tombstone = select(
    tombstones.c.owner, tombstones.c.job_id, tombstones.c.kind, tombstones.c.status, tombstones.c.finished_at,
    tombstones.c.expired_at,
).where(tombstones.c.job_id == bindparam("of_job"))


def find_tombstone(view: Connection, job_id: str, owner: str) -> Expired | None:
    """What is left of a job; None when nothing is, or it is another owner's."""
    row = view.execute(_find_tombstone, {"of_job": job_id}).first()
    if row is None or row.owner != owner:
        return None
    return Expired(row.job_id, row.kind, row.status, row.finished_at, row.expired_at)
