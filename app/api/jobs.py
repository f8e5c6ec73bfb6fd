"""`/jobs`: submitting, polling, listing, and what may still be asked of a job."""
from __future__ import annotations

import json
import logging
from typing import Any

from flask import Blueprint, Response, request
from pydantic import ValidationError

from app import (
    circuits, clock, db, deliveries, ids, interventions, jobs, kinds, logs, ownership, pages, status, submissions,
)
from app.api import answers, door, polling, queries, shutdown, tokens
from app.errors import Flaw, InvalidInput
from app.kinds import Kind

log = logging.getLogger("uketsuke.api")
blueprint = Blueprint("jobs", __name__)

DEFAULT_KIND = "primes"


@blueprint.post("/jobs")
def submit() -> Response:
    """Accepts a job: 202 once it is committed."""
    given = {"kind": DEFAULT_KIND, **door.read_object()}
    key = door.key_of(given)
    if (first := submissions.replay(tokens.owner(), key)) is not None:
        return answers.accepted(first, str(given["kind"]))
    members = dict(given)
    kind = _kind(members.pop("kind"))
    callback_url = door.callback_url(members)
    if (refusal := _refusal(kind, json.dumps(members))) is not None:
        raise refusal
    receipt = submissions.submit_job(tokens.owner(), kind, members, callback_url, key, clock.now())
    return answers.accepted(receipt, kind.name)


def _refusal(kind: Kind, text: str) -> InvalidInput | None:
    """What is wrong with an input. A kind's own validators may raise anything: then it is no input either."""
    try:
        try:
            kinds.read_input(kind, text)
        except ValidationError as error:
            return door.flaws(error)  # whose messages may be a stranger's exceptions
    except (Exception, SystemExit) as error:
        log.error("an input cannot be validated", extra={"kind": kind.name, **logs.where(error)})
        return InvalidInput([Flaw("#", "cannot be validated")])
    return None


def _kind(name: Any) -> Kind:
    offered = {kind.name: kind for kind in kinds.registry().values() if kind.public}
    if not isinstance(name, str) or name not in offered:
        raise InvalidInput([Flaw("#/kind", f"must be one of {', '.join(sorted(offered))}")])
    return offered[name]


@blueprint.get("/jobs")
def index() -> Response:
    """The owner's jobs, newest first."""
    asked = queries.read(queries.JobsQuery)
    with db.reading() as view:
        found = pages.jobs_of(
            view, tokens.owner(), clock.now(), asked.limit, asked.status, asked.kind, asked.cursor)
    return answers.page("jobs", [status.document(*each) for each in found.jobs], found.cursor)


@blueprint.get("/jobs/<job_id>")
def poll(job_id: str) -> Response:
    """The job as it is, or as it is after its next change (Prefer: wait)."""
    shown, environ = polling.find(job_id), request.environ
    seconds = polling.preferred_wait(environ)
    if seconds is None:
        return polling.answer(shown, environ)
    with polling.a_waiter() as granted:
        if granted:
            shown = polling.after_change(job_id, shown, seconds)
    answer = polling.answer(shown, environ)
    if granted and not shutdown.wait(0):
        answer.headers["Preference-Applied"] = f"wait={seconds}"
    return answer


@blueprint.post("/jobs/<job_id>/cancel")
def cancel(job_id: str) -> Response:
    """Ends a queued job, asks a running one to stop."""
    job, callback = interventions.cancel(tokens.owner(), _checked(job_id), clock.now())
    answer = answers.of_json(status.document(job, callback))
    if not job.final:
        answer.headers["Retry-After"] = answers.retry_after(job.kind, job.created_at, job.started_at)
    return answer


@blueprint.get("/jobs/<job_id>/deliveries")
def list_deliveries(job_id: str) -> Response:
    """Every attempt to tell the job's end."""
    with db.reading() as view:
        job = ownership.owned(jobs.find(view, _checked(job_id)), view, job_id, tokens.owner(), clock.now())
        attempts = deliveries.attempts_of_job(view, job_id)
        circuit = circuits.find(view, circuits.endpoint_of(job.callback_url)) if job.callback_url and attempts else None
    document: dict[str, Any] = {"deliveries": [deliveries.attempt_as_document(attempt) for attempt in attempts]}
    if circuit is not None:
        document["endpoint"] = circuits.as_document(circuit)
    return answers.of_json(document)


@blueprint.post("/jobs/<job_id>/redeliver")
def redeliver(job_id: str) -> Response:
    """Tells the job's end once more: 202 once that is committed."""
    delivery = interventions.redeliver(tokens.owner(), _checked(job_id), clock.now())
    answer = answers.of_json({"job_id": job_id, "callback": deliveries.as_document(delivery)}, 202)
    answer.headers["Location"] = answers.address(jobs.path(job_id) + "/deliveries")
    return answer


def _checked(job_id: str) -> str:
    if not ids.is_id(job_id):
        raise ownership.unknown()
    return job_id
