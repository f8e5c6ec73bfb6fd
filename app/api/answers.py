"""Answers that several blueprints give."""
from __future__ import annotations

import json
from typing import Any

from flask import Response

from app import jobs
from app.submissions import Receipt

RETRY_AFTER_SECONDS = 1  # when to poll again; nothing better is known


def of_json(document: dict[str, Any]) -> Response:
    """200 with this document."""
    return Response(json.dumps(document, ensure_ascii=False) + "\n", content_type="application/json")


def accepted(receipt: Receipt) -> Response:
    """202, the same for every repetition of a key (RFC 9110 15.3.3)."""
    headers = {"Location": jobs.path(receipt.job_id), "Retry-After": str(RETRY_AFTER_SECONDS)}
    if receipt.note_id is not None:
        headers["Link"] = f'</notes/{receipt.note_id}>; rel="related"'
    if receipt.replayed:
        headers["Idempotent-Replayed"] = "true"
    return Response(receipt.body, 202, headers, content_type="application/json")
