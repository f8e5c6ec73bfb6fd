"""Moves of several jobs in one statement, or in one round trip: of those that share a transaction."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, bindparam, func, select, update

from app import statements, states
from app.clock import now as the_present
from app.errors import UketsukeError
from app.jobs import ENDED, Job, columns
from app.schema import Moment, jobs

_hold_first = select(*columns).where(
    jobs.c.id.in_(bindparam("ids", expanding=True)), jobs.c.status == states.QUEUED, jobs.c.attempt == 0,
).order_by(jobs.c.id).with_for_update(key_share=True, skip_locked=True)


def hold_first(tx: Connection, job_ids: Sequence[str]) -> list[Job]:
    """Those of these jobs that wait for their first attempt and that nobody moves at this moment. Until the transaction
    ends nobody else does."""
    return [Job(*row) for row in tx.execute(_hold_first, {"ids": list(job_ids)})]


# A start and an end, in one: `version` counts both, as of any attempt.
_succeed = update(jobs).where(
    jobs.c.id == bindparam("job_id"), jobs.c.status == states.QUEUED, jobs.c.version == bindparam("seen"),
).values(
    status=states.SUCCEEDED, version=jobs.c.version + 2, attempt=jobs.c.attempt + 1, worker=bindparam("by"),
    result=bindparam("outcome"), started_at=bindparam("began"),
    published_at=func.coalesce(jobs.c.published_at, bindparam("published", type_=Moment())), **ENDED)


@dataclass(frozen=True)
class Finished:
    """A job that was queued, and what its attempt came to within the transaction that holds it. `result` is JSON."""

    job: Job
    result: str
    started_at: datetime
    finished_at: datetime
    published_at: datetime | None  # of the message that led here


def succeed(tx: Connection, worker: str, successes: Sequence[Finished], ttl: timedelta) -> list[Job]:
    """queued → succeeded, all of them or none: nobody has seen them run, since they began and ended in this
    transaction, which holds them. Raises UketsukeError when one of them is no longer as it was seen."""
    if not successes:
        return []
    changed = statements.changed_by_all(tx, _succeed, [
        {"job_id": one.job.id, "seen": one.job.version, "by": worker, "outcome": one.result, "began": one.started_at,
         "published": one.published_at, "now": one.finished_at, "expires": one.finished_at + ttl}
        for one in successes])
    if changed != len(successes):
        raise UketsukeError(f"{len(successes)} jobs were held, {changed} of them could be ended")
    return [replace(
        one.job, status=states.SUCCEEDED, version=one.job.version + 2, attempt=one.job.attempt + 1, worker=worker,
        result=one.result, published_at=one.job.published_at or one.published_at, started_at=one.started_at,
        finished_at=one.finished_at, expires_at=one.finished_at + ttl, as_of=the_present()) for one in successes]


# Each number of ids is a statement of its own to a database, so all are padded to this one: as many as one thread
# records at a time (`slices.MOST`).
MOST_TOUCHED = 32
_touch = update(jobs).where(statements.listed(jobs.c.id, "id", MOST_TOUCHED)).values(
    version=jobs.c.version + 1).returning(jobs.c.id, jobs.c.version)


def touch(tx: Connection, known: Sequence[Job]) -> dict[str, Job]:
    """As `jobs.touch`, of jobs that are final, of which nothing else changes; by their ids."""
    ids = [job.id for job in known]
    versions: dict[str, int] = dict(itertools.chain.from_iterable(statements.together(tx, *(
        (_touch, statements.listing("id", ids[at:at + MOST_TOUCHED], MOST_TOUCHED))
        for at in range(0, len(ids), MOST_TOUCHED)))))
    now = the_present()
    return {job.id: replace(job, version=versions[job.id], as_of=now) for job in known}
