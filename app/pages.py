"""Lists of what an owner has, newest first. A page goes on from an id, so what is added meanwhile neither repeats nor
hides anything."""
from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import Connection, literal, or_, select

from app.deliveries import Delivery
from app.jobs import Job
from app.notes import Note
from app.schema import deliveries, jobs, notes

RESULT_BYTES = 1024 * 1024  # of a page's results together, beyond its first: large results make short pages

# Without the inputs, which no list shows and which may be large.
_job_columns = [
    literal("").label("input") if field.name == "input" else jobs.c[field.name]
    for field in fields(Job) if field.name != "as_of"]
_delivery_columns = [deliveries.c[field.name] for field in fields(Delivery)]
_note_columns = [notes.c[field.name] for field in fields(Note)]


@dataclass(frozen=True)
class JobsPage:
    """Jobs, each with the latest round of its callback, and the cursor of the next page, None at the end."""

    jobs: list[tuple[Job, Delivery | None]]
    cursor: str | None


@dataclass(frozen=True)
class NotesPage:
    """Notes, and the cursor of the next page, None at the end."""

    notes: list[Note]
    cursor: int | None


def jobs_of(
    view: Connection, owner: str, now: datetime, limit: int, status: str | None, kind: str | None, cursor: str | None,
) -> JobsPage:
    """At most `limit` of the owner's jobs that can still be read, of this status and kind, older than the cursor."""
    query = select(*_job_columns).where(
        jobs.c.owner == owner, or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > now))
    for column, asked in ((jobs.c.status, status), (jobs.c.kind, kind)):
        if asked is not None:
            query = query.where(column == asked)
    if cursor is not None:
        query = query.where(jobs.c.id < cursor)
    found: list[Job] = []
    size = 0
    for row in view.execute(query.order_by(jobs.c.id.desc()).limit(limit + 1)):
        job = Job(*row)
        size += len((job.result or "").encode())
        if len(found) == limit or found and size > RESULT_BYTES:
            return JobsPage(_with_callbacks(view, found), found[-1].id)
        found.append(job)
    return JobsPage(_with_callbacks(view, found), None)


def _with_callbacks(view: Connection, found: list[Job]) -> list[tuple[Job, Delivery | None]]:
    asked = [job.id for job in found if job.callback_url is not None]
    rows = view.execute(select(*_delivery_columns).where(deliveries.c.job_id.in_(asked)).order_by(
        deliveries.c.created_at, deliveries.c.id)) if asked else ()
    latest = {row.job_id: Delivery(*row) for row in rows}
    return [(job, latest.get(job.id)) for job in found]


def notes_of(view: Connection, owner: str, limit: int, cursor: int | None) -> NotesPage:
    """At most `limit` of the owner's notes, older than the cursor."""
    query = select(*_note_columns).where(notes.c.owner == owner)
    if cursor is not None:
        query = query.where(notes.c.id < cursor)
    rows = [Note(*row) for row in view.execute(query.order_by(notes.c.id.desc()).limit(limit + 1))]
    return NotesPage(rows[:limit], rows[limit - 1].id if len(rows) > limit else None)
