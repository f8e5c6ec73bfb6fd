"""The operations of `/jobs`."""
from __future__ import annotations

from functools import partial
from typing import Any

from openapi_pydantic.v3.v3_1 import PathItem, RequestBody

from app.api import models, queries
from app.api.operations.parts import answer, link, nothing, operation, parameter, query

_PATH = f"/jobs/{models.JOB_ID}"
_BORN = {"job_id": models.JOB_ID, "kind": "primes", "attempt": 1, "created_at": "2026-11-29T18:40:00.123Z"}
_BEGUN = {**_BORN, "started_at": "2026-11-29T18:40:00.234Z"}
_ENDED = {**_BEGUN, "finished_at": "2026-11-29T18:40:02.345Z", "expires_at": "2026-11-30T18:40:02.345Z"}
QUEUED = {**_BORN, "status": "queued", "attempt": 0}
RUNNING = {**_BEGUN, "status": "running", "progress": {"done": 3, "total": 10}}
SUCCEEDED = {**_ENDED, "status": "succeeded", "result": {"n": 5, "count": 3}}
FAILED = {**_ENDED, "status": "failed", "error": {"code": "timeout", "message": "took longer than 300 s"}}
CANCELLED = {**FAILED, "error": {"code": "cancelled", "message": "cancelled on request"}}
_CALLBACK = {"status": "pending", "attempts": 1, "next_attempt_at": "2026-11-29T18:45:02.345Z", "last_response": 503}
_ATTEMPT = {
    "webhook_id": f"msg_{models.JOB_ID}", "attempt": 1, "at": "2026-11-29T18:40:02.456Z", "response_code": 503,
    "error": None, "duration_seconds": 0.021, "excerpt": "try later"}

JOB_ID = parameter(
    "path", "job_id", "The job's id.", models.Accepted.model_json_schema()["properties"]["job_id"], models.JOB_ID)
IDEMPOTENCY_KEY = parameter(
    "header", "Idempotency-Key", "1 to 255 printable ASCII characters, bare or as a quoted string: the same key and "
    "the same request again get the first answer again, byte for byte.",
    {"type": "string", "pattern": r'^([!#-~]([ -~]{0,253}[!-~])?|"([ !#-\[\]-~]|\\["\\]){1,255}")$'}, "order-7f3a")
_STATE = [
    parameter("header", "If-None-Match", "The ETag of the state that is known: 304 when it is still that one.",
              {"type": "string"}),
    parameter("header", "Prefer", "`wait=N`: hold the answer until the status changes, for at most N seconds (30 at "
              "most; RFC 7240).", {"type": "string"}, "wait=10"),
]
_STATE_HEADERS = ("ETag", "Vary", "Retry-After?", "Sunset", "Preference-Applied")
SUBMISSION = (
    "malformed-json", "bad-idempotency-key", "too-large", "not-json", "invalid-input", "key-reused", "backlog-full",
    "busy")
ACCEPTED_HEADERS = ("Location", "Retry-After", "Idempotent-Replayed")
_UNREADABLE = ("not-found", "expired")


def job_links(**more: Any) -> dict[str, Any]:
    """Where to go from an answer that names a job."""
    here = "$response.body#/job_id"
    return {**{name: link(name, job_id=here) for name in (
        "getJob", "cancelJob", "listDeliveries", "redeliverCallback")}, **more}


def paths(body: RequestBody, closed: bool) -> dict[str, PathItem]:
    """The path items of `/jobs`."""
    described = partial(operation, tag="jobs", closed=closed)
    return {
        "/jobs": PathItem(
            get=described(
                "listJobs", summary="List the jobs, the newest first", refusals=["invalid-input"], instance="/jobs",
                parameters=query(queries.JobsQuery), answers={200: answer(
                    "A page.", models.JobList, "Link", page={"jobs": [QUEUED, SUCCEEDED]})}),
            post=described(
                "submitJob", summary="Submit a job", refusals=SUBMISSION, instance="/jobs",
                body=body, parameters=[IDEMPOTENCY_KEY],
                description="It is kept in one transaction before the answer is given, and will reach a final status.",
                answers={202: answer(
                    "The job is kept.", models.Accepted, *ACCEPTED_HEADERS, links=job_links(),
                    accepted={"job_id": models.JOB_ID, "status": "queued"})})),
        "/jobs/{job_id}": PathItem(parameters=[JOB_ID], get=_poll(closed), head=_poll(closed, "headJob", False)),
        "/jobs/{job_id}/cancel": PathItem(parameters=[JOB_ID], post=described(
            "cancelJob", summary="Cancel a job", refusals=[*_UNREADABLE, "finished"], instance=f"{_PATH}/cancel",
            description="A queued one fails at once; a running one is asked to stop, and then stopped. Repeatable.",
            answers={200: answer("The job as it is now.", models.Job, "Retry-After?",
                                 cancelled=CANCELLED, running=RUNNING)})),
        "/jobs/{job_id}/deliveries": PathItem(parameters=[JOB_ID], get=described(
            "listDeliveries", summary="Every try to tell the job's end", refusals=_UNREADABLE,
            instance=f"{_PATH}/deliveries", answers={200: answer(
                "The attempts, the oldest first.", models.DeliveryList, one={"deliveries": [_ATTEMPT]})})),
        "/jobs/{job_id}/redeliver": PathItem(parameters=[JOB_ID], post=described(
            "redeliverCallback", summary="Tell the job's end once more",
            refusals=[*_UNREADABLE, "unfinished", "no-callback"], instance=f"{_PATH}/redeliver",
            answers={202: answer(
                "One more round of attempts begins.", models.Redelivery, "Location",
                links={"listDeliveries": link("listDeliveries", job_id="$response.body#/job_id")},
                redelivery={"job_id": models.JOB_ID, "callback": {**_CALLBACK, "attempts": 0}})})),
    }


def _poll(closed: bool, name: str = "getJob", with_body: bool = True) -> Any:
    shown: dict[str, Any] = {
        "queued": QUEUED, "running": RUNNING, "succeeded": SUCCEEDED, "failed": FAILED,
        "told": {**SUCCEEDED, "callback": _CALLBACK}}
    found = answer("The job as it is now, a failed one too.", models.Job, *_STATE_HEADERS, **shown)
    return operation(
        name, "jobs", "Poll a job" if with_body else "Poll a job without its body", refusals=_UNREADABLE,
        parameters=_STATE, instance=_PATH, closed=closed, with_body=with_body,
        answers={200: found if with_body else nothing("As GET.", *_STATE_HEADERS),
                 304: nothing("It is still the state of If-None-Match.", *_STATE_HEADERS)})
