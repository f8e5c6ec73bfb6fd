"""Answers that several blueprints give."""
from __future__ import annotations

import json
from typing import Any

from flask import Response, request

from app import jobs
from app.submissions import Receipt

RETRY_AFTER_SECONDS = 1  # when to poll again; nothing better is known


def address(path: str) -> str:
    """A path of this service as its client reaches it: behind a prefix, when a trusted proxy says so."""
    return request.script_root + path


def of_json(document: dict[str, Any]) -> Response:
    """200 with this document."""
    return Response(json.dumps(document, ensure_ascii=False) + "\n", content_type="application/json")


def accepted(receipt: Receipt) -> Response:
    """202, the same for every repetition of a key (RFC 9110 15.3.3)."""
    headers = {"Location": address(jobs.path(receipt.job_id)), "Retry-After": str(RETRY_AFTER_SECONDS)}
    if receipt.note_id is not None:
        headers["Link"] = f'<{address(f"/notes/{receipt.note_id}")}>; rel="related"'
    if receipt.replayed:
        headers["Idempotent-Replayed"] = "true"
    return Response(receipt.body, 202, headers, content_type="application/json")
