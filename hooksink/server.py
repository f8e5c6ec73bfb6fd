"""The routes: `POST /` and `POST /<anything>` take hooks, some paths misbehave on request, and `GET /` shows what
came."""
from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
from werkzeug.routing import BaseConverter

from hooksink import journal, misbehaviour, page, received, signature
from hooksink.journal import Journal

MAX_BODY_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """What a hook gets, and whether its webhook id was accepted before."""

    status: int
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    wait_seconds: float = 0
    duplicate: bool = False


class Anything(BaseConverter):
    """The rest of a path, slashes and all."""

    regex = "(?s:.*?)"
    part_isolating = False


def secrets() -> tuple[str, ...]:
    """CALLBACK_SECRETS, or the one that the service keeps in `var/` (which it may make only later)."""
    given = tuple(part.strip() for part in os.environ.get("CALLBACK_SECRETS", "").split(",") if part.strip())
    if given:
        return given
    kept = Path(os.environ.get("VAR_DIR") or "var") / "callback_secret"
    return (kept.read_text(errors="replace").strip(),) if kept.exists() else ()


def log_path() -> Path:
    """HOOK_LOG, or hook.log in `var/`."""
    return Path(os.environ.get("HOOK_LOG") or Path(os.environ.get("VAR_DIR") or "var") / "hook.log")


def check() -> None:
    """Raises ValueError or OSError, with one line, when the secrets or the log cannot be used."""
    if not all(signature.is_secret(secret) for secret in secrets()):
        raise ValueError("CALLBACK_SECRETS=(hidden) cannot be used: whsec_ and the base64 of 24 to 64 bytes, "
                         "comma separated, newest first")
    Journal(log_path())


def create_app() -> Flask:
    """A WSGI application that logs to HOOK_LOG."""
    app = Flask("hooksink", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES + 1  # of a chunked body as much is read, and no error raised
    app.url_map.converters["anything"] = Anything
    log, failures, hooks, since = Journal(log_path()), misbehaviour.Failures(), received.Received(), journal.moment()

    @app.post("/", defaults={"path": ""})
    @app.post("/<anything:path>")
    def take(path: str) -> Response:
        """Verifies and logs, and answers as the path asks."""
        at, body, webhook_id = journal.moment(), _body(), request.headers.get("webhook-id", "")
        wrong = _wrong(body)
        try:
            if wrong is not None:
                log.refused(webhook_id, wrong)
                answer = Answer(413 if body is None else 401, wrong)
            else:
                answer = _taken(path, body or b"", webhook_id)
        except OSError as error:
            answer = Answer(500, f"hook.log cannot be written: {error.strerror}")
            print(f"hooksink: {answer.text}", file=sys.stderr, flush=True)
        hooks.add(_shown(at, body or b"", webhook_id, wrong, answer))
        time.sleep(answer.wait_seconds)
        return _line(answer.status, answer.text, answer.headers)

    def _taken(path: str, body: bytes, webhook_id: str) -> Answer:
        """The answer to a hook whose signature holds."""
        try:
            asked = misbehaviour.asked(path, request.args.get("retry_after"))
        except ValueError as error:
            return Answer(400, str(error))
        if asked.fail_times and failures.once_more(webhook_id, asked.fail_times):
            return Answer(503, "not yet", asked.headers)
        told = received.members(body)
        job_id, status = told.get("job_id"), told.get("status")
        if not isinstance(job_id, str) or not isinstance(status, str):
            return Answer(400, "not a hook of a job")
        again = log.accepted(job_id, status, webhook_id)
        return Answer(asked.status, headers={} if asked.status == 204 else asked.headers,
                      wait_seconds=asked.wait_seconds, duplicate=again)

    @app.get("/")
    def index() -> Response:
        """The page."""
        return page.render(hooks, since, str(log_path()), os.environ.get("PORT") or "8140",
                           os.environ.get("HOOKSINK_PORT") or "8141")

    @app.errorhandler(HTTPException)
    def failed(error: HTTPException) -> Response:
        """One line, whatever goes wrong."""
        return _line(error.code or 500, error.name, {name: value for name, value in error.get_headers()
                                                     if name == "Allow"})

    @app.after_request
    def plainly(response: Response) -> Response:
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    return app


def _body() -> bytes | None:
    """None for one that is too long."""
    try:
        body = request.get_data()
    except RequestEntityTooLarge:
        return None
    return body if len(body) <= MAX_BODY_BYTES else None


def _wrong(body: bytes | None) -> str | None:
    """Why the signature does not hold; None when it does."""
    if body is None:
        return f"the body is over {MAX_BODY_BYTES} bytes"
    headers = {name.lower(): value for name, value in request.headers.items()}
    return signature.verify(headers, body, secrets(), time.time())


def _shown(at: str, body: bytes, webhook_id: str, wrong: str | None, answer: Answer) -> received.Hook:
    told, (shown, cut) = received.members(body), received.body_of(body)
    after = f" after {answer.wait_seconds:g} s" if answer.wait_seconds else ""
    sent = "".join(f"; {name}: {value}" for name, value in answer.headers.items())
    return received.Hook(
        at=at, path=received.text_of(request.full_path.removesuffix("?")), webhook_id=received.text_of(webhook_id),
        job_id=received.text_of(told.get("job_id")), kind=received.text_of(told.get("type")),
        status=received.text_of(told.get("status")), wrong=wrong, duplicate=answer.duplicate,
        answer=f"{answer.status} {answer.text}".rstrip() + after + sent, body=shown, body_bytes=len(body), cut=cut)


def _line(status: int, text: str, headers: dict[str, str]) -> Response:
    return Response(f"{text}\n" if text else "", status, headers, content_type="text/plain; charset=utf-8")
