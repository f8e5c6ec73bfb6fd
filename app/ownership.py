"""Whose job it is: what belongs to another owner does not exist."""
from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from app import retention
from app.errors import Expired, NotFound
from app.jobs import Job


def unknown() -> NotFound:
    """There is no such job, or it is another owner's: nobody can tell which."""
    return NotFound("no job has this id")


def owned(found: Job | None, view: Connection, job_id: str, owner: str, now: datetime) -> Job:
    """The job that was found, when it is this owner's and can still be read. Raises NotFound and Expired."""
    job = kept(found, view, job_id, owner)
    if has_expired(job, now):
        raise expired(job)
    return job


def kept(found: Job | None, view: Connection, job_id: str, owner: str) -> Job:
    """As `owned`, when the job has not been pruned, whether it can still be read or not."""
    if found is None:
        raise retention.find_tombstone(view, job_id, owner) or unknown()
    if found.owner != owner:
        raise unknown()
    return found


def has_expired(job: Job, now: datetime) -> bool:
    """Whether the job's time to live is over."""
    return job.expires_at is not None and job.expires_at <= now


def expired(job: Job) -> Expired:
    """The end of a final job's time to live."""
    assert job.finished_at is not None and job.expires_at is not None
    return Expired(job.id, job.kind, job.status, job.finished_at, job.expires_at)
