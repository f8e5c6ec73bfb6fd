"""A job as its clients read it: from the view when that knows it, else from SQL; held back for whoever prefers to
wait."""
from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from flask import Response, current_app, request
from werkzeug.http import http_date

from app import clock, db, deliveries, ids, jobs, ownership, states, status
from app.api import answers, shutdown, tokens
from app.status import View

MAX_WAIT_SECONDS = 30  # a proxy gives up after sixty, as a rule
_LOOK_SECONDS = 0.1  # sixteen who wait ask 160 times a second, one in thirty of what a machine answers
_WAIT = re.compile(r'\s*wait\s*=\s*"?([0-9]{1,100})"?\s*(;.*)?', re.IGNORECASE)


def find(job_id: str) -> View:
    """The job as it is. Raises `errors.NotFound` and `errors.Expired`."""
    if not ids.is_id(job_id):
        raise ownership.unknown()
    shown = status.read(job_id)
    if shown is None:
        return _from_sql(job_id)
    if shown.owner != tokens.owner():
        raise ownership.unknown()
    return shown


def _from_sql(job_id: str) -> View:
    """SQL's answer, put back into the view."""
    with db.reading() as view:
        job = ownership.owned(jobs.find(view, job_id), view, job_id, tokens.owner(), clock.now())
        delivery = None if job.callback_url is None else deliveries.latest_of_job(view, job_id)
    status.write(job, delivery, asked_for=True)
    return status.view(job, delivery)


def answer(shown: View, environ: Mapping[str, Any]) -> Response:
    """200 with the job, or 304 to whoever has this state already (RFC 9110 13.1.2)."""
    body = shown.body + "\n"
    etag = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    headers = [("ETag", f'"{etag}"')]
    if shown.status not in states.FINAL:
        running_since = _moment(shown.started_at) if shown.started_at and shown.status == states.RUNNING else None
        headers.append(("Retry-After", answers.retry_after(
            shown.kind, _moment(shown.created_at), running_since, shown.job_id)))
    elif shown.expires_at is not None:
        headers.append(("Sunset", http_date(_moment(shown.expires_at))))  # RFC 8594
    headers.append(("Vary", "Prefer"))
    code = 200
    if "HTTP_IF_NONE_MATCH" in environ:
        headers.append(("Cache-Control", "private, no-cache"))
        if request.if_none_match.contains_weak(etag):  # the only condition: werkzeug's 412 would be no problem+json
            code = 304
    return answers.Answer(body, code, headers)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


# --- waiting ---


def preferred_wait(environ: Mapping[str, Any]) -> int | None:
    """How many seconds the client would wait for a change (RFC 7240 4.3), MAX_WAIT_SECONDS at most; None when it has no
    such preference, or none that can be read."""
    for preference in environ.get("HTTP_PREFER", "").split(","):
        if found := _WAIT.fullmatch(preference):
            return min(int(found[1]), MAX_WAIT_SECONDS)
    return None


def after_change(job_id: str, shown: View, seconds: int) -> View:
    """The job once its status is another one than here, or as it is after so many seconds, or when this process is to
    stop. Raises as `find` does."""
    until, first = time.monotonic() + seconds, shown.status
    while shown.status == first and first not in states.FINAL and (left := until - time.monotonic()) > 0:
        if shutdown.wait(min(_LOOK_SECONDS, left)):
            break
        shown = find(job_id)
    return shown


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
