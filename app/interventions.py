"""What a client may still ask of a job that it has submitted, each in one transaction: to be cancelled, and to have its
end told once more."""
from __future__ import annotations

import random
from datetime import datetime, timedelta

from sqlalchemy import Connection

from app import circuits, db, deliveries, jobs, metrics, outbox, ownership, retention, states, status, turns
from app.config import settings
from app.deliveries import Delivery
from app.errors import Finished, NoCallback, Unfinished
from app.jobs import Job

_LATER = timedelta(microseconds=1)  # a round is the latest one also when the clock that began the last one was ahead


def cancel(owner: str, job_id: str, now: datetime) -> tuple[Job, Delivery | None]:
    """A queued job ends at once; a running one is asked to stop and has no other end than `cancelled` from then on.
    Repeating it changes nothing. Returns the job as it is then, with its callback.

    Raises `errors.NotFound`, `errors.Expired`, and `errors.Finished` when it has ended otherwise.
    """
    with db.transaction() as tx:
        job = ownership.owned(jobs.hold(tx, job_id), tx, job_id, owner, now)
        if job.final and job.error_code != states.CANCELLED:
            raise Finished(f"the job has {job.status}")
        if job.status == states.QUEUED:
            job = _end_queued(tx, job, now)
        elif job.status == states.RUNNING:
            job = jobs.request_cancel(tx, job_id, now) or job
        callback = None if job.callback_url is None else deliveries.latest_of_job(tx, job_id)
    if job.finished_at == now:
        metrics.ended(job)
    if job.final:  # of one that runs nothing changes that clients see, and the view may know its progress better
        status.write(job, callback, wake=callback is not None)
    return job, callback


def _end_queued(tx: Connection, job: Job, now: datetime) -> Job:
    ended = jobs.cancel(tx, job.id, now, timedelta(seconds=settings().result_ttl_seconds))
    assert ended is not None  # it is held
    outbox.settle(tx, states.RUN_JOB, job.id)
    if ended.callback_url is not None:
        deliveries.add(tx, ended, deliveries.first_attempt_at(now, random.random()), now)
    return ended


def redeliver(owner: str, job_id: str, now: datetime) -> Delivery:
    """One more round of telling how the job ended, from now on; a round that waits for its next attempt makes it now
    instead. Returns the delivery. It is possible as long as the job can be read, or its callback is kept for that.

    Raises `errors.NotFound`, `errors.Expired`, `errors.Unfinished` and `errors.NoCallback`.
    """
    latest = _redeliver(owner, job_id, None, now, now)
    assert latest is not None
    return latest


def redeliver_after(
    ended_id: str, owner: str, job_id: str, first_attempt_at: datetime, now: datetime,
) -> Delivery | None:
    """As `redeliver`, when the job's latest round is this one and has ended; otherwise None, and nothing is changed: so
    whoever asks for a round after this one, and however often, gets one. Its first attempt is made at that moment."""
    return _redeliver(owner, job_id, ended_id, first_attempt_at, now)


def _redeliver(
    owner: str, job_id: str, ended_id: str | None, first_attempt_at: datetime, now: datetime,
) -> Delivery | None:
    with db.transaction() as tx:
        job = _tellable(ownership.kept(jobs.keep(tx, job_id), tx, job_id, owner), now)
        turns.hold(tx, deliveries.host_of(job.callback_url or ""))
        latest = deliveries.latest_of_job(tx, job_id)
        kept = latest is not None and retention.is_kept_for(latest.state, latest.finished_at, now)
        if ownership.has_expired(job, now) and not kept:
            raise ownership.expired(job)
        if ended_id is not None and not _has_ended(latest, ended_id):
            return None
        circuits.resume(tx, circuits.endpoint_of(job.callback_url or ""))
        if latest is not None and latest.state == states.PENDING:
            latest = deliveries.hasten(tx, latest, now) or latest
        else:
            began = now if latest is None else max(now, latest.created_at + _LATER)
            latest = deliveries.add(tx, job, first_attempt_at, began)
        job = jobs.touch(tx, job_id)
    status.write(job, latest, wake=first_attempt_at <= now)
    return latest


def _tellable(job: Job, now: datetime) -> Job:
    if job.callback_url is None:
        raise ownership.expired(job) if ownership.has_expired(job, now) else NoCallback(
            "the job was submitted without a callback_url")
    if not job.final:
        raise Unfinished(f"the job is {job.status}")
    return job


def _has_ended(latest: Delivery | None, ended_id: str) -> bool:
    return latest is not None and latest.id == ended_id and latest.state not in states.UNFINISHED_DELIVERIES
