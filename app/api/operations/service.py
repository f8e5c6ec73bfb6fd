"""The operations by which the service speaks of itself."""
from __future__ import annotations

from functools import partial

from openapi_pydantic.v3.v3_1 import PathItem, Response

from app.api import models
from app.api.docs import FILES
from app.api.operations.parts import answer, operation, parameter
from app.api.problems import TABLE

_PAGE = "text/html; charset=utf-8"
_PARTS = {
    "database": {"ok": True, "detail": "SQLite 3.51.3"}, "redis": {"ok": True, "detail": "valkey 9.1.2"},
    "workers": {"ok": False, "detail": "0 alive, 0 slots"}}


class OpenApi(models.BaseModel):
    """An OpenAPI document."""

    openapi: str


def paths(closed: bool) -> dict[str, PathItem]:
    """The path items of everything else. All but `/metrics` are open."""
    public = partial(operation, tag="service", open=True)
    name = parameter("path", "name", "A problem's name.", {"enum": sorted(TABLE)}, "expired")
    file = parameter("path", "file", "A part of the page.", {"enum": sorted(FILES)}, "start.js")
    return {
        "/health": PathItem(get=public("getHealth", summary="Whether the process lives", answers={
            200: answer("It does.", models.Health, lives={"status": "ok"})})),
        "/health/ready": PathItem(get=public(
            "getReadiness", summary="Whether accepted jobs are being worked off", answers={
                200: answer("They are.", models.Readiness, ready={"status": "ready", "parts": {
                    name: {**part, "ok": True} for name, part in list(_PARTS.items())[:2]}}),
                503: answer("Some part is missing.", models.Readiness, missing={
                    "status": "not ready", "parts": _PARTS})})),
        "/metrics": PathItem(get=operation(
            "getMetrics", "service", "Counters and histograms for Prometheus", closed=closed, instance="/metrics",
            limited=False, answers={200: _metrics()})),
        "/openapi.json": PathItem(get=public("getOpenApi", summary="This document", answers={
            200: answer("OpenAPI 3.1.", OpenApi)})),
        "/docs": PathItem(get=public("getDocs", summary="A page to read and try this document", answers={
            200: answer("The page.", None, "Content-Security-Policy", content_type=_PAGE)})),
        "/docs/{file}": PathItem(parameters=[file], get=public(
            "getDocsFile", summary="A part of that page", refusals=["not-found"], instance="/docs/none", answers={
                200: answer("The file.", None, content_type="*/*")})),
        "/problems/{name}": PathItem(parameters=[name], get=public(
            "getProblem", summary="A page about one type of problem", refusals=["not-found"],
            instance="/problems/none", answers={200: answer("The page.", content_type=_PAGE)})),
    }


def _metrics() -> Response:
    made = answer("In Prometheus's text format, or as OpenMetrics.", None, "Vary", content_type="text/plain")
    assert made.content is not None
    made.content["application/openmetrics-text"] = made.content["text/plain"]
    return made
