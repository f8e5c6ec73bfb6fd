"""The one transaction behind a 202: note, job, outbox row and idempotency record together, or none of them."""
from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from app import db, idempotency, ids, jobs, metrics, notes, outbox, outlook, states, status
from app.config import settings
from app.errors import BacklogFull
from app.jobs import Job
from app.kinds import Kind

log = logging.getLogger("uketsuke.submissions")


@dataclass(frozen=True)
class Key:
    """An idempotency key and the request that it stands for."""

    text: str
    fingerprint: str


@dataclass(frozen=True)
class Receipt:
    """What a submission is answered with: byte for byte the same for every repetition of its key."""

    job_id: str
    note_id: int | None
    body: str
    replayed: bool


Write = Callable[[Connection], tuple[Job, int | None, dict[str, Any]]]


def submit_job(
    owner: str, kind: Kind, members: dict[str, Any], callback_url: str | None, key: Key | None, now: datetime,
) -> Receipt:
    """Accepts a job: it will reach a final status, whatever dies from here on.

    `members` has been validated as the kind's input. Raises `errors.KeyReused`, `errors.BacklogFull`, and
    `sqlalchemy.exc.DBAPIError` when nothing could be kept.
    """

    def write(tx: Connection) -> tuple[Job, int | None, dict[str, Any]]:
        job = _new_job(owner, kind, members, callback_url, None, now)
        _put(tx, job)
        return job, None, {"job_id": job.id, "status": job.status}

    return _once(owner, key, write, now)


def submit_note(
    owner: str, text: str, history: Kind, callback_url: str | None, key: Key | None, now: datetime, root: str = "",
) -> Receipt:
    """Keeps a note and accepts its history job, in one transaction. `root` is what stands before the service's paths.
    Raises as `submit_job` does."""

    def write(tx: Connection) -> tuple[Job, int | None, dict[str, Any]]:
        note_id = notes.add(tx, owner, text, now)
        job = _new_job(owner, history, {"note_id": note_id}, callback_url, note_id, now)
        _put(tx, job)
        body = {"id": note_id, "text": text, "job_id": job.id, "status_url": root + jobs.path(job.id)}
        return job, note_id, body

    return _once(owner, key, write, now)


def _new_job(
    owner: str, kind: Kind, members: dict[str, Any], callback_url: str | None, note_id: int | None, now: datetime,
) -> Job:
    return Job(
        id=ids.new_id(now), owner=owner, kind=kind.name, queue=kind.queue, status=states.QUEUED, version=0, attempt=0,
        max_attempts=kind.max_attempts, time_limit_seconds=kind.time_limit,
        input=json.dumps(members, ensure_ascii=False), result=None, error_code=None, error_message=None,
        progress_done=None, progress_total=None, note_id=note_id, callback_url=callback_url, worker=None,
        lease_until=None, cancel_requested_at=None, published_at=None, created_at=now, started_at=None,
        finished_at=None, expires_at=None)


def _put(tx: Connection, job: Job) -> None:
    jobs.submit(tx, vars(job))
    outbox.stage(tx, states.RUN_JOB, job.id, job.queue, job.created_at, time_limit_seconds=job.time_limit_seconds)


def replay(owner: str, key: Key | None) -> Receipt | None:
    """The first answer under this key; None when there is none yet. Raises `errors.KeyReused` for another request."""
    if key is None:
        return None
    with db.reading() as view:
        first = idempotency.replay(view, owner, key.text, key.fingerprint)
    if first is None:
        return None
    metrics.replayed()
    log.info("accepted", extra={"job_id": first.job_id, "replayed": True})
    return Receipt(first.job_id, first.note_id, first.body, replayed=True)


def _once(owner: str, key: Key | None, write: Write, now: datetime) -> Receipt:
    outlook.latest()  # before the transaction, in which a look would take too long
    try:
        job, receipt = _commit(owner, key, write, now)
    except (BacklogFull, IntegrityError):
        # A concurrent submission of the key was first, and has committed; without one it is an error.
        first = replay(owner, key)
        if first is None:
            raise
        return first
    metrics.submitted(job.kind)
    log.info("accepted", extra={"job_id": job.id, "kind": job.kind, "replayed": False})
    status.write(job, wake=True)
    return receipt


def _commit(owner: str, key: Key | None, write: Write, now: datetime) -> tuple[Job, Receipt]:
    with db.transaction() as tx:
        outlook.refuse_beyond(tx, settings().max_backlog)
        job, note_id, answer = write(tx)
        body = json.dumps(answer, ensure_ascii=False) + "\n"
        if key is not None:
            record = idempotency.Record(key.fingerprint, job.id, note_id, body)
            idempotency.keep(tx, owner, key.text, record, now)
    return job, Receipt(job.id, note_id, body, replayed=False)
