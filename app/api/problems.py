"""Problem details (RFC 9457): the only table of status codes, and the pages that explain it."""
from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from flask import Blueprint, Flask, Response, g, render_template_string, request
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import HTTPException

from app import db, errors, logs, metrics
from app.clock import isoformat

log = logging.getLogger("uketsuke.api")
blueprint = Blueprint("problems", __name__)

RETRY_AFTER_SECONDS = 2  # a thousand who were refused ask 500 times a second then, no more
BACKLOG_RETRY_AFTER_SECONDS = 30  # in which two processes work off some ten thousand short jobs


@dataclass(frozen=True)
class Entry:
    """A line of the table: the status, its title, and what a client can do about it."""

    status: int
    title: str
    advice: str


TABLE: dict[str, Entry] = {
    "malformed-json": Entry(400, "The body is not JSON", "Send one JSON object in UTF-8: no NaN or Infinity, no member "
                            "twice, no NUL or lone surrogate in a text, no more than 32 levels deep."),
    "bad-idempotency-key": Entry(400, "The Idempotency-Key cannot be used", "1 to 255 printable ASCII characters, bare "
                                 "or as a quoted string."),
    "bad-request": Entry(400, "The request cannot be understood", "See the detail."),
    "unauthorized": Entry(401, "A token is needed", "Send Authorization: Bearer with a token of this service."),
    "not-found": Entry(404, "There is no such thing", "The address is wrong, the thing never existed, it belongs to "
                       "somebody else, or it expired so long ago that it is forgotten."),
    "method-not-allowed": Entry(405, "The method is not allowed here", "See the Allow header."),
    "finished": Entry(409, "The job has ended", "What has succeeded or failed cannot be cancelled any more."),
    "unfinished": Entry(409, "The job has not ended", "Its end can be told again once there is one: see its status."),
    "no-callback": Entry(409, "The job has no callback", "It was submitted without a callback_url: poll it."),
    "expired": Entry(410, "The job has expired", "It finished, and its result was kept for its time to live. Submit it "
                     "again if the result is still needed."),
    "too-large": Entry(413, "The body is too large", "At most 1 MiB."),
    "not-json": Entry(415, "The body is not declared as JSON", "Send Content-Type: application/json."),
    "invalid-input": Entry(422, "The input is not what this resource takes", "See the errors: each names the place in "
                           "the body and what is wrong there."),
    "key-reused": Entry(422, "The Idempotency-Key stands for another request", "A key belongs to one request. The "
                        "original's address is in the problem's location."),
    "rate-limited": Entry(429, "Too many requests", "Repeat the request after Retry-After seconds."),
    "internal": Entry(500, "Something went wrong here", "With an Idempotency-Key the request can be repeated safely."),
    "busy": Entry(503, "Too many bodies are on their way", "Repeat the request after Retry-After seconds."),
    "unavailable": Entry(503, "The database is not available", "Repeat the request after Retry-After seconds; with an "
                         "Idempotency-Key that is safe even when its answer was lost."),
    "backlog-full": Entry(503, "There is too much work already", "Nothing was kept. Repeat the request after "
                          "Retry-After seconds, with the same Idempotency-Key if it had one."),
}
_BY_STATUS = {400: "bad-request", 404: "not-found", 405: "method-not-allowed", 413: "too-large", 415: "not-json"}


@dataclass
class Problem(Exception):
    """An answer that is a problem of the TABLE."""

    name: str
    detail: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def answer(problem: Problem) -> Response:
    """The problem as a response of type `application/problem+json`; it is counted, and a line of the log says it."""
    entry = TABLE[problem.name]
    metrics.refused(problem.name)
    log.log(logging.ERROR if entry.status >= 500 else logging.INFO, "refused", extra={
        "problem": problem.name, "status": entry.status, "rule": str(request.url_rule or "none")})
    root = request.script_root
    body = {
        "type": f"{root}/problems/{problem.name}", "title": entry.title, "status": entry.status,
        "detail": problem.detail, "instance": quote(root + request.path), "request_id": g.get("request_id"),
        **problem.extra}
    headers = dict(problem.headers)
    if entry.status == 503:
        headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    text = json.dumps(body, ensure_ascii=True) + "\n"  # a path may hold what UTF-8 cannot
    return Response(text, entry.status, headers, content_type="application/problem+json")


def _from_http(error: HTTPException) -> Response:
    """What Flask itself refuses: no route, wrong method, ..."""
    if error.code is None or error.code < 400:
        return error.get_response()  # type: ignore[return-value]
    name = _BY_STATUS.get(error.code, "bad-request" if error.code < 500 else "internal")
    headers = {}
    if isinstance(methods := getattr(error, "valid_methods", None), list | set | tuple):
        headers["Allow"] = ", ".join(sorted(methods))
    return answer(Problem(name, error.description or TABLE[name].title, headers=headers))


def _from_ours(error: errors.UketsukeError) -> Response:
    return answer(as_problem(error))


def as_problem(error: errors.UketsukeError) -> Problem:
    """The problem that stands for an exception of `app.errors`."""
    match error:
        case errors.InvalidInput():
            flaws = [{"pointer": flaw.pointer, "detail": flaw.detail} for flaw in error.flaws]
            return Problem("invalid-input", str(error), {"errors": flaws})
        case errors.KeyReused():
            location = request.script_root + error.location
            return Problem("key-reused", str(error), {"location": location}, {"Location": location})
        case errors.Finished():
            return Problem("finished", str(error))
        case errors.Unfinished():
            return Problem("unfinished", str(error))
        case errors.NoCallback():
            return Problem("no-callback", str(error))
        case errors.BacklogFull():
            return Problem("backlog-full", str(error), headers={"Retry-After": str(BACKLOG_RETRY_AFTER_SECONDS)})
        case errors.NotFound():
            return Problem("not-found", str(error))
        case errors.Expired():
            return Problem("expired", str(error), {
                "job_id": error.job_id, "kind": error.kind, "job_status": error.status,
                "finished_at": isoformat(error.finished_at), "expired_at": isoformat(error.expired_at)})
    _log_unexpected(error)
    return Problem("internal", TABLE["internal"].title)


def _from_database(error: Exception) -> Response:
    """Away, locked or overloaded: come back. Anything else that it refuses is ours to mend."""
    log.error("the database refused", extra={"error": db.reason(error)})
    if db.is_away(error):
        return answer(Problem("unavailable", "the database cannot be used now"))
    return answer(Problem("internal", "the database refused the change; nothing was kept"))


def _from_anything(error: Exception) -> Response:
    _log_unexpected(error)
    return answer(Problem("internal", "an unexpected error"))


def _log_unexpected(error: Exception) -> None:
    log.error("an unexpected exception", extra=logs.where(error))


def handle_all(app: Flask) -> None:
    """Makes every error of this application a problem."""
    app.register_error_handler(Problem, answer)
    app.register_error_handler(HTTPException, _from_http)
    app.register_error_handler(errors.UketsukeError, _from_ours)
    app.register_error_handler(DBAPIError, _from_database)
    app.register_error_handler(PoolTimeout, _from_database)
    app.register_error_handler(Exception, _from_anything)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ entry.title }}</title>
<style>body { font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }</style>
<h1>{{ entry.title }}</h1>
<p>Status {{ entry.status }}, type <code>/problems/{{ name }}</code></p>
<p>{{ entry.advice }}</p>
</html>
"""


@blueprint.get("/problems/<name>")
def explain(name: str) -> Response:
    """A page about one type of problem."""
    if name not in TABLE:
        raise errors.NotFound("no problem has this name")
    page = render_template_string(_PAGE, name=name, entry=TABLE[name])
    return Response(page, content_type="text/html; charset=utf-8")
