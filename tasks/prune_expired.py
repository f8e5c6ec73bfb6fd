"""The pruning: finished jobs past their time to live become tombstones, old tombstones and keys go."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from datetime import datetime, timedelta

from sqlalchemy import Connection

from app import clock, db, retention, status
from app.config import settings
from tasks import celery

log = logging.getLogger("uketsuke.prune")

# Of an endpoint that answers well, that is how often it is noted anew; of one that fails, each attempt is a change.
_ENDPOINT_UNCHANGED = timedelta(days=1)


@celery.task("tasks.prune_expired")
def prune_expired() -> None:
    """One tick of the pruning."""
    run_once(clock.now())


def run_once(now: datetime) -> int:
    """Prunes all that is due, a batch a transaction; returns how many jobs became tombstones."""
    buried = _each_batch(lambda tx: retention.bury_expired_jobs(tx, now), status.forget)
    tombstones_before = now - timedelta(seconds=settings().tombstone_ttl_seconds)
    keys_before = now - timedelta(seconds=settings().idempotency_ttl_seconds)
    gone = _each_batch(lambda tx: range(retention.forget_tombstones(tx, tombstones_before)))
    keys = _each_batch(lambda tx: range(retention.forget_keys(tx, keys_before)))
    endpoints = _each_batch(lambda tx: range(retention.forget_endpoints(tx, now - _ENDPOINT_UNCHANGED)))
    if buried or gone or keys or endpoints:
        log.info("pruned", extra={"jobs": buried, "tombstones": gone, "keys": keys, "endpoints": endpoints})
    return buried


def _each_batch(prune: Callable[[Connection], Sized], then: Callable[..., None] | None = None) -> int:
    total = 0
    while True:
        with db.transaction() as tx:
            batch = prune(tx)
        if then is not None:
            then(batch)
        total += len(batch)
        if len(batch) < retention.BATCH:
            return total
