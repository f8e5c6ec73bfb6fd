"""`/jobs`: submitting and polling."""
from __future__ import annotations

import json
from typing import Any

from flask import Blueprint, Response
from pydantic import ValidationError
from sqlalchemy import Connection

from app import clock, db, deliveries, ids, jobs, kinds, retention, states, status, submissions
from app.api import answers, door, tokens
from app.errors import Expired, Flaw, InvalidInput, NotFound
from app.jobs import Job
from app.kinds import Kind

blueprint = Blueprint("jobs", __name__)

_DEFAULT_KIND = "primes"


@blueprint.post("/jobs")
def submit() -> Response:
    """Accepts a job: 202 once it is committed."""
    given = {"kind": _DEFAULT_KIND, **door.read_object()}
    key = door.key_of(given)
    if (first := submissions.replay(tokens.owner(), key)) is not None:
        return answers.accepted(first)
    members = dict(given)
    kind = _kind(members.pop("kind"))
    callback_url = door.callback_url(members)
    try:
        kinds.read_input(kind, json.dumps(members))
    except ValidationError as error:
        raise door.flaws(error) from None
    return answers.accepted(
        submissions.submit_job(tokens.owner(), kind, members, callback_url, key, clock.now()))


def _kind(name: Any) -> Kind:
    offered = {kind.name: kind for kind in kinds.registry().values() if kind.public}
    if not isinstance(name, str) or name not in offered:
        raise InvalidInput([Flaw("#/kind", f"must be one of {', '.join(sorted(offered))}")])
    return offered[name]


@blueprint.get("/jobs/<job_id>")
def poll(job_id: str) -> Response:
    """The job as it is, from the view when that knows it, else from SQL."""
    if not ids.is_id(job_id):
        raise _unknown()
    shown = status.read(job_id)
    if shown is not None and shown.owner != tokens.owner():
        raise _unknown()
    document = _from_sql(job_id) if shown is None else shown.document
    answer = answers.of_json(document)
    if document["status"] not in states.FINAL:
        answer.headers["Retry-After"] = str(answers.RETRY_AFTER_SECONDS)
    return answer


@blueprint.get("/jobs/<job_id>/deliveries")
def list_deliveries(job_id: str) -> Response:
    """Every try to tell the job's end."""
    if not ids.is_id(job_id):
        raise _unknown()
    with db.reading() as view:
        _find(view, job_id)
        attempts = deliveries.attempts_of_job(view, job_id)
    return answers.of_json({"deliveries": [deliveries.attempt_as_document(attempt) for attempt in attempts]})


def _from_sql(job_id: str) -> dict[str, Any]:
    """SQL's answer, put back into the view. Raises NotFound and Expired."""
    with db.reading() as view:
        job = _find(view, job_id)
        delivery = None if job.callback_url is None else deliveries.latest_of_job(view, job_id)
    status.write(job, delivery)
    return status.document(job, delivery)


def _unknown() -> NotFound:
    """There is no such job, or it is another owner's: nobody can tell which."""
    return NotFound("no job has this id")


def _find(view: Connection, job_id: str) -> Job:
    """This owner's job by a well-formed id. Raises NotFound and Expired."""
    job = jobs.find(view, job_id)
    if job is None:
        raise retention.find_tombstone(view, job_id, tokens.owner()) or _unknown()
    if job.owner != tokens.owner():
        raise _unknown()
    if job.expires_at is not None and job.finished_at is not None and job.expires_at <= clock.now():
        raise Expired(job.id, job.kind, job.status, job.finished_at, job.expires_at)
    return job
