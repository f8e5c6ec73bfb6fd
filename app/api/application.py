"""`create_app()`: the Flask application with everything that concerns every request."""
from __future__ import annotations

import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from flask import Flask, Request, Response
from flask.globals import app_ctx, request_ctx
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import MapAdapter

from app import kinds, logs, metrics
from app.api import docs, door, health, jobs, notes, openapi, problems, rates, tokens
from app.api import metrics as metrics_page
from app.config import settings

_PREFIX = re.compile(r"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*")

log = logging.getLogger("uketsuke.api")


class Application(Flask):
    """Flask with one function before each request, one after it, and one at its end, and one way to read an address:
    what it does to find and call any number of them costs a poll as much as they do."""

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """For the path alone: routes are the same for every host, and lead to no other address."""
        if request is None:
            return None
        return MapAdapter(
            self.url_map, "", request.root_path, "", request.scheme, request.path, request.method)

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return func  # nothing here is a coroutine

    def preprocess_request(self) -> None:
        _begin_request()

    def process_response(self, response: Response) -> Response:
        return _finish_response(response)

    def do_teardown_request(self, *_: Any, **__: Any) -> None:
        logs.forget()

    def do_teardown_appcontext(self, *_: Any, **__: Any) -> None:
        pass


def create_app() -> Flask:
    """A WSGI application with all routes; reads the settings and the kinds.

    Raises `errors.WrongSetting` or `errors.WrongKind` with one line.
    """
    app = Application("uketsuke", static_folder=None)
    app.url_map.merge_slashes = False  # its redirect would be built from the Host header
    app.url_map.strict_slashes = False  # /jobs/ is /jobs, without a redirect that would lose a POST's body
    kinds.registry()
    app.wsgi_app = _without_upgrade(app.wsgi_app)  # type: ignore[method-assign]
    if proxies := settings().trusted_proxies:
        app.wsgi_app = ProxyFix(  # type: ignore[method-assign]
            _without_odd_prefix(app.wsgi_app), x_for=proxies, x_proto=proxies, x_host=proxies, x_prefix=proxies)
    app.extensions["uketsuke_places"] = threading.BoundedSemaphore(math.ceil(settings().web_threads * 3 / 4))
    app.extensions["uketsuke_waiters"] = threading.BoundedSemaphore(settings().web_waiters)
    for blueprint in (jobs.blueprint, notes.blueprint, health.blueprint, problems.blueprint, openapi.blueprint,
                      docs.blueprint, metrics_page.blueprint):
        app.register_blueprint(blueprint)
    problems.handle_all(app)
    app.log_exception = _log_exception  # type: ignore[method-assign, assignment]
    return app


def _without_upgrade(application: Any) -> Any:
    """Whoever would rather speak another protocol is answered in this one (RFC 9110 7.8). Routing would refuse a
    WebSocket."""

    def inner(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_UPGRADE", None)
        return application(environ, start_response)

    return inner


def _log_exception(found: Any) -> None:
    """What no handler has handled; Flask's own line would hold the path."""
    log.error("an uncaught exception", extra=logs.where(found[1]))


def _without_odd_prefix(application: Any) -> Any:
    """A prefix becomes a part of addresses, so it is a path or it is nothing: a proxy that sets none passes on what its
    client sent."""

    def inner(environ: dict[str, Any], start_response: Any) -> Any:
        prefix = environ.get("SCRIPT_NAME", "").removesuffix("/")
        environ["SCRIPT_NAME"] = prefix if _PREFIX.fullmatch(prefix) else ""
        return application(environ, start_response)

    return inner


def _begin_request() -> None:
    name = str(uuid.uuid4())
    about = app_ctx.g  # each look through a proxy takes as long as a lookup in three dictionaries
    about.request_id, about.began = name, time.perf_counter()
    logs.concern(request_id=name)
    door.refuse_ambiguous(request_ctx.request.environ)
    tokens.require()
    rates.require()


def _finish_response(response: Response) -> Response:
    headers, asked, about = response.headers, request_ctx.request, app_ctx.g
    headers.add("X-Request-Id", about.request_id)
    if "Cache-Control" not in headers:
        headers.add("Cache-Control", "no-store")
    headers.add("X-Content-Type-Options", "nosniff")
    rule = asked.url_rule
    metrics.answered(
        "none" if rule is None else rule.rule, asked.method, response.status_code, time.perf_counter() - about.began)
    return response
