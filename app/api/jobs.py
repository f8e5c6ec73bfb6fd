"""`/jobs`: submitting and polling."""
from __future__ import annotations

import json
from typing import Any

from flask import Blueprint, Response
from pydantic import ValidationError

from app import clock, db, deliveries, idempotency, ids, jobs, kinds, retention, status, submissions
from app.api import door, tokens
from app.errors import Expired, Flaw, InvalidInput, NotFound
from app.jobs import Job
from app.kinds import Kind
from app.submissions import Key, Receipt

blueprint = Blueprint("jobs", __name__)

_DEFAULT_KIND = "primes"
_RETRY_AFTER_SECONDS = 1  # nothing better is known


@blueprint.post("/jobs")
def submit() -> Response:
    """Accepts a job: 202 once it is committed."""
    key = door.idempotency_key()
    members = door.read_object()
    kind = _kind(members.pop("kind", _DEFAULT_KIND))
    callback_url = door.callback_url(members)
    try:
        kinds.read_input(kind, json.dumps(members))
    except ValidationError as error:
        raise door.flaws(error) from None
    request = {"kind": kind.name, "input": members, "callback_url": callback_url}
    receipt = submissions.submit_job(
        tokens.owner(), kind, members, callback_url, bind("/jobs", key, request), clock.now())
    return accepted(receipt)


def _kind(name: Any) -> Kind:
    offered = {kind.name: kind for kind in kinds.registry().values() if kind.public}
    if not isinstance(name, str) or name not in offered:
        raise InvalidInput([Flaw("#/kind", f"must be one of {', '.join(sorted(offered))}")])
    return offered[name]


def bind(path: str, key: str | None, request: dict[str, Any]) -> Key | None:
    """The key with the fingerprint of the request that it stands for."""
    return None if key is None else Key(key, idempotency.fingerprint("POST", path, request))


def accepted(receipt: Receipt) -> Response:
    """202, the same for every repetition of a key (RFC 9110 15.3.3)."""
    headers = {"Location": jobs.path(receipt.job_id), "Retry-After": str(_RETRY_AFTER_SECONDS)}
    if receipt.note_id is not None:
        headers["Link"] = f'</notes/{receipt.note_id}>; rel="related"'
    if receipt.replayed:
        headers["Idempotent-Replayed"] = "true"
    response = Response(receipt.body, 202, headers, content_type="application/json")
    response.autocorrect_location_header = False
    return response


@blueprint.get("/jobs/<job_id>")
def poll(job_id: str) -> Response:
    """The job as it is, from the view when that knows it, else from SQL."""
    if not ids.is_id(job_id):
        raise NotFound("no job has this id")
    shown = status.read(job_id)
    if shown is None:
        job, document = _from_sql(job_id)
        return _answer(document, job.final)
    if shown.owner != tokens.owner():
        raise NotFound("no job has this id")
    return _answer(shown.document, "finished_at" in shown.document)


@blueprint.get("/jobs/<job_id>/deliveries")
def list_deliveries(job_id: str) -> Response:
    """Every try to tell the job's end."""
    if not ids.is_id(job_id):
        raise NotFound("no job has this id")
    _from_sql(job_id)
    with db.reading() as view:
        attempts = deliveries.attempts_of_job(view, job_id)
    return _json({"deliveries": [deliveries.attempt_as_document(attempt) for attempt in attempts]})


def _from_sql(job_id: str) -> tuple[Job, dict[str, Any]]:
    """SQL's answer, put back into the view. Raises NotFound and Expired."""
    with db.reading() as view:
        job = jobs.find(view, job_id)
        if job is None:
            raise retention.find_tombstone(view, job_id, tokens.owner()) or NotFound("no job has this id")
        delivery = None if job.callback_url is None else deliveries.latest_of_job(view, job_id)
    if job.owner != tokens.owner():
        raise NotFound("no job has this id")
    if job.expires_at is not None and job.finished_at is not None and job.expires_at <= clock.now():
        raise Expired(job.id, job.kind, job.status, job.finished_at, job.expires_at)
    status.write(job, delivery)
    return job, status.document(job, delivery)


def _answer(document: dict[str, Any], final: bool) -> Response:
    response = _json(document)
    if not final:
        response.headers["Retry-After"] = str(_RETRY_AFTER_SECONDS)
    return response


def _json(document: dict[str, Any]) -> Response:
    return Response(json.dumps(document, ensure_ascii=False) + "\n", content_type="application/json")
