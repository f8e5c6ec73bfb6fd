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
    if found is None:
        raise retention.find_tombstone(view, job_id, owner) or unknown()
    if found.owner != owner:
        raise unknown()
    if found.expires_at is not None and found.finished_at is not None and found.expires_at <= now:
        raise Expired(found.id, found.kind, found.status, found.finished_at, found.expires_at)
    return found
