"""A job as its clients read it: from the view when that knows it, else from SQL; held back for whoever prefers to
wait."""
from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from flask import Response, current_app, request
from werkzeug.http import http_date

from app import clock, db, deliveries, ids, jobs, ownership, states, status
from app.api import answers, shutdown, tokens

MAX_WAIT_SECONDS = 30
_LOOK_SECONDS = 0.1
_WAIT = re.compile(r'\s*wait\s*=\s*"?([0-9]{1,100})"?\s*(;.*)?', re.IGNORECASE)

Document = dict[str, Any]


def find(job_id: str) -> Document:
    """The job as it is. Raises `errors.NotFound` and `errors.Expired`."""
    if not ids.is_id(job_id):
        raise ownership.unknown()
    shown = status.read(job_id)
    if shown is None:
        return _from_sql(job_id)
    if shown.owner != tokens.owner():
        raise ownership.unknown()
    return shown.document


def _from_sql(job_id: str) -> Document:
    """SQL's answer, put back into the view."""
    with db.reading() as view:
        job = ownership.owned(jobs.find(view, job_id), view, job_id, tokens.owner(), clock.now())
        delivery = None if job.callback_url is None else deliveries.latest_of_job(view, job_id)
    status.write(job, delivery)
    return status.document(job, delivery)


def answer(document: Document) -> Response:
    """200 with the job, or 304 to whoever has this state already (RFC 9110 13.1.2)."""
    made = answers.of_json(document)
    etag = hashlib.blake2b(made.get_data(), digest_size=16).hexdigest()
    made.set_etag(etag)
    if document["status"] not in states.FINAL:
        started_at = document.get("started_at") if document["status"] == states.RUNNING else None
        made.headers["Retry-After"] = answers.retry_after(
            document["kind"], _moment(document["created_at"]), started_at and _moment(started_at), document["job_id"])
    elif "expires_at" in document:
        made.headers["Sunset"] = http_date(_moment(document["expires_at"]))  # RFC 8594
    made.headers["Vary"] = "Prefer"
    if "If-None-Match" in request.headers:
        made.headers["Cache-Control"] = "private, no-cache"
        if request.if_none_match.contains_weak(etag):  # the only condition: werkzeug's 412 would be no problem+json
            made.status_code = 304
    return made


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


# --- waiting ---


def preferred_wait() -> int | None:
    """How many seconds the client would wait for a change (RFC 7240 4.3), MAX_WAIT_SECONDS at most; None when it has no
    such preference, or none that can be read."""
    for preference in ",".join(request.headers.getlist("Prefer")).split(","):
        if found := _WAIT.fullmatch(preference):
            return min(int(found[1]), MAX_WAIT_SECONDS)
    return None


def after_change(job_id: str, document: Document, seconds: int) -> Document:
    """The job once its status is another one than here, or as it is after so many seconds, or when this process is to
    stop. Raises as `find` does."""
    until, first = time.monotonic() + seconds, document["status"]
    while document["status"] == first and first not in states.FINAL and (left := until - time.monotonic()) > 0:
        if shutdown.wait(min(_LOOK_SECONDS, left)):
            break
        document = find(job_id)
    return document


@contextlib.contextmanager
def a_waiter() -> Iterator[bool]:
    """Whether one more request of this process may wait, for the block: WEB_WAITERS of them, each in a thread that no
    other request needs."""
    waiters: threading.Semaphore = current_app.extensions["uketsuke_waiters"]
    granted = waiters.acquire(blocking=False)
    try:
        yield granted
    finally:
        if granted:
            waiters.release()
