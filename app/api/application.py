"""`create_app()`: the Flask application with everything that concerns every request."""
from __future__ import annotations

import logging
import uuid

from flask import Flask, Response, g, request

from app import kinds
from app.api import health, jobs, notes, problems, tokens

log = logging.getLogger("uketsuke.api")


def create_app() -> Flask:
    """A WSGI application with all routes; reads the settings and the kinds.

    Raises `errors.WrongSetting` or `errors.WrongKind` with one line.
    """
    app = Flask("uketsuke", static_folder=None)
    app.url_map.merge_slashes = False  # its redirect would be built from the Host header
    app.url_map.strict_slashes = False  # /jobs/ is /jobs, without a redirect that would lose a POST's body
    kinds.registry()
    app.before_request(_name_request)
    app.before_request(tokens.require)
    app.after_request(_finish_response)
    for blueprint in (jobs.blueprint, notes.blueprint, health.blueprint, problems.blueprint):
        app.register_blueprint(blueprint)
    problems.handle_all(app)
    return app


def _name_request() -> None:
    g.request_id = str(uuid.uuid4())


def _finish_response(response: Response) -> Response:
    response.headers["X-Request-Id"] = g.request_id
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    if response.status_code >= 500 and request.path != "/health/ready":
        log.error("answered with an error", extra={
            "request_id": g.request_id, "method": request.method, "rule": str(request.url_rule),
            "status": response.status_code})
    return response
