"""Answers that several blueprints give."""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from flask import Response, request
from werkzeug.datastructures import Headers

from app import clock, ids, jobs, outlook, states, status
from app.submissions import Receipt

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class _Headers(Headers):
    """Headers of ours, as they are to be: werkzeug would check each, and once more when they are sent."""

    def __init__(self, headers: list[tuple[str, str]]) -> None:
        self._list = headers

    def add(self, key: str, value: str, /, **_: Any) -> None:
        self._list.append((key, value))

    def __contains__(self, key: object) -> bool:  # werkzeug's raises an exception for what is not there
        wanted = str(key).lower()
        return wanted in [name.lower() for name, _ in self._list]


class Answer(Response):
    """JSON text, with headers of whole texts that no client has written."""

    def __init__(self, body: str, code: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        data = body.encode()
        super().__init__([data], code, _Headers([
            ("Content-Type", "application/json"), ("Content-Length", str(len(data))), *headers]))

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """A list, of which the server knows that it is all there is: anything else it asks for part after part."""
        if self.status_code not in (200, 202) or environ["REQUEST_METHOD"] == "HEAD":
            return super().__call__(environ, start_response)
        start_response(self.status, self.headers.to_wsgi_list())
        return self.response  # type: ignore[return-value]


def address(path: str) -> str:
    """A path of this service as its client reaches it: behind a prefix, when a trusted proxy says so."""
    return request.script_root + path


def of_json(document: Mapping[str, Any], code: int = 200) -> Response:
    """An answer with this document."""
    return Answer(json.dumps(document, ensure_ascii=False) + "\n", code)


def page(name: str, documents: list[dict[str, Any]], cursor: object | None) -> Response:
    """200 with a part of a list, and where it goes on (RFC 8288)."""
    answer = of_json({name: documents})
    if cursor is not None:
        asked = {key: value for key, value in request.args.items() if value and key != "cursor"}
        query = urlencode({**asked, "cursor": cursor})
        answer.headers["Link"] = f'<{address(request.path)}?{query}>; rel="next"'
    return answer


def retry_after(
    kind: str, created_at: datetime, started_at: datetime | None = None, job_id: str = "",
) -> str:
    """The value of Retry-After for an unfinished job (RFC 9110 10.2.3): whole seconds."""
    return str(outlook.latest().seconds_left(kind, created_at, started_at, clock.now(), job_id))


def accepted(receipt: Receipt, kind: str) -> Response:
    """202, the same for every repetition of a key (RFC 9110 15.3.3)."""
    headers = [("Location", address(jobs.path(receipt.job_id))), ("Retry-After", _ask_after(receipt, kind))]
    if receipt.note_id is not None:
        headers.append(("Link", f'<{address(f"/notes/{receipt.note_id}")}>; rel="related"'))
    if receipt.replayed:
        headers.append(("Idempotent-Replayed", "true"))
    return Answer(receipt.body, 202, headers)


def _ask_after(receipt: Receipt, kind: str) -> str:
    if not receipt.replayed:
        created_at = ids.moment_of(receipt.job_id)
        seconds = retry_after(kind, created_at)
        outlook.accepted(kind, created_at)
        return seconds
    shown = status.read(receipt.job_id)
    if shown is not None and shown.status in states.FINAL:
        return "1"
    return retry_after(kind, ids.moment_of(receipt.job_id), job_id=receipt.job_id)
