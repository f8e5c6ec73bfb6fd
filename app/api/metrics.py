"""`/metrics`: what Prometheus reads."""
from __future__ import annotations

from flask import Blueprint, Response, request

from app import metrics

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics")
def scrape() -> Response:
    """200 with what is known now, whatever is away."""
    text, content_type = metrics.scrape(request.headers.get("Accept", ""))
    return Response(text, content_type=content_type, headers={"Vary": "Accept"})
