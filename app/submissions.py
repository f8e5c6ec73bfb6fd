"""The one transaction behind a 202: note, job, outbox row and idempotency record together, or none of them. Submissions
that come at the same time share it."""
from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from app import clock, db, idempotency, ids, jobs, metrics, notes, outbox, outlook, statements, states, status, waking
from app.config import settings
from app.errors import BacklogFull
from app.group_commit import GroupCommit
from app.jobs import Job
from app.kinds import Kind
from app.outbox import Target

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


@dataclass
class _Submission:
    """What is asked for; `job`, `note_id` and `body` once they are written. `note` is the text of a note."""

    owner: str
    kind: Kind
    members: dict[str, Any]
    callback_url: str | None
    key: Key | None
    now: datetime
    note: str | None = None
    root: str = ""
    note_id: int | None = None
    job: Job | None = None
    body: str = ""
    leased_until: datetime | None = None


def submit_job(
    owner: str, kind: Kind, members: dict[str, Any], callback_url: str | None, key: Key | None, now: datetime,
) -> Receipt:
    """Accepts a job: it will reach a final status, whatever dies from here on.

    `members` has been validated as the kind's input. Raises `errors.KeyReused`, `errors.BacklogFull`, and
    `sqlalchemy.exc.DBAPIError` when nothing could be kept.
    """
    return _submit(_Submission(owner, kind, members, callback_url, key, now))


def submit_note(
    owner: str, text: str, history: Kind, callback_url: str | None, key: Key | None, now: datetime, root: str = "",
) -> Receipt:
    """Keeps a note and accepts its history job, in one transaction. `root` is what stands before the service's paths.
    Raises as `submit_job` does."""
    return _submit(_Submission(owner, history, {}, callback_url, key, now, text, root))


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


def _submit(new: _Submission) -> Receipt:
    outlook.latest()  # before the transaction, in which a look would take too long
    try:
        _group.commit(new)
    except (BacklogFull, IntegrityError):
        # A concurrent submission of the key was first, and has committed; without one it is an error.
        first = replay(new.owner, new.key)
        if first is None:
            raise
        return first
    assert new.job is not None
    metrics.submitted(new.job.kind)
    log.info("accepted", extra={"job_id": new.job.id, "kind": new.job.kind, "replayed": False})
    return Receipt(new.job.id, new.note_id, new.body, replayed=False)


# --- the transaction, of all submissions that come at the same time ---


def _write(tx: Connection, batch: Sequence[_Submission]) -> None:
    now = batch[0].now
    outlook.refuse_beyond(tx, settings().max_backlog, len(batch))
    if noted := [new for new in batch if new.note is not None]:
        for new, note_id in zip(noted, notes.add(tx, [(new.owner, new.note or "") for new in noted], now)):
            new.note_id, new.members = note_id, {"note_id": note_id}
    written = [new_job(new.owner, new.kind, new.members, new.callback_url, new.note_id, new.now) for new in batch]
    until = waking.leased_until(clock.now())  # they may have waited long for the writer's turn
    for new, job in zip(batch, written):
        new.job, new.body = job, json.dumps(_answer(new, job), ensure_ascii=False) + "\n"
        new.leased_until = until
    asked = [jobs.submitting(tx, written),
             outbox.staging(tx, states.RUN_JOB, _targets(batch), now, leased_until=until)]
    if records := [
        (new.owner, new.key.text, idempotency.Record(new.key.fingerprint, job.id, new.note_id, new.body))
        for new, job in zip(batch, written) if new.key is not None
    ]:
        asked.append(idempotency.keeping(tx, records, now))
    statements.together(tx, *asked, last=True)


def new_job(
    owner: str, kind: Kind, members: dict[str, Any], callback_url: str | None, note_id: int | None, now: datetime,
) -> Job:
    """A job as it is when it has been submitted."""
    return Job(
        id=ids.new_id(now), owner=owner, kind=kind.name, queue=kind.queue, status=states.QUEUED, version=0, attempt=0,
        max_attempts=kind.max_attempts, time_limit_seconds=float(kind.time_limit),
        input=json.dumps(members, ensure_ascii=False), result=None, error_code=None, error_message=None,
        progress_done=None, progress_total=None, note_id=note_id, callback_url=callback_url, worker=None,
        lease_until=None, cancel_requested_at=None, published_at=None, created_at=now, started_at=None,
        finished_at=None, expires_at=None)


def _together_with(new: _Submission) -> str | None:
    """What may share this job's first message: its kind. Of those that share a transaction too, only jobs that nobody
    wants to be told of."""
    return None if new.kind.together and new.callback_url is not None else new.kind.name


def _answer(new: _Submission, job: Job) -> dict[str, Any]:
    if new.note is None:
        return {"job_id": job.id, "status": job.status}
    return {"id": new.note_id, "text": new.note, "job_id": job.id, "status_url": new.root + jobs.path(job.id)}


def _targets(of: Sequence[_Submission]) -> list[Target]:
    return [(new.job.id, new.job.queue, new.job.time_limit_seconds, _together_with(new))
            for new in of if new.job is not None]


def _show(committed: Sequence[_Submission]) -> None:
    # First, as the relay's way is longer. Mostly all of them are of one transaction.
    for until in dict.fromkeys(new.leased_until for new in committed):
        waking.hand_over(states.RUN_JOB, _targets([new for new in committed if new.leased_until == until]), until)
    status.write_all([(new.job, None) for new in committed if new.job is not None])


# A commit takes the processor almost as long for one submission as for seven: those of clients that come all at once
# are answered sooner together (16 of them: in 9 ms instead of 11). Who comes alone is not held up.
_PATIENCE_SECONDS = 0.008
_group = GroupCommit(_write, _show, _PATIENCE_SECONDS)
