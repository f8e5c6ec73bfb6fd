"""The routes: `POST /` and `POST /<anything>` take hooks; some paths misbehave, so that a person can see
repeated attempts."""
from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

from flask import Flask, request

from hooksink import signature
from hooksink.journal import Journal, plain

MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_SLOW_SECONDS = 120.0


def secrets() -> tuple[str, ...]:
    """CALLBACK_SECRETS, or the one that the service keeps in `var/` (which it may make only later)."""
    given = tuple(part.strip() for part in os.environ.get("CALLBACK_SECRETS", "").split(",") if part.strip())
    if given:
        return given
    kept = Path(os.environ.get("VAR_DIR") or "var") / "callback_secret"
    return (kept.read_text().strip(),) if kept.exists() else ()


def log_path() -> Path:
    """HOOK_LOG, or hook.log in `var/`."""
    return Path(os.environ.get("HOOK_LOG") or Path(os.environ.get("VAR_DIR") or "var") / "hook.log")


def check() -> None:
    """Raises ValueError or OSError, with one line, when the secrets or the log cannot be used."""
    if not all(signature.is_secret(secret) for secret in secrets()):
        raise ValueError("CALLBACK_SECRETS=(hidden) cannot be used: whsec_ and base64, comma separated")
    Journal(log_path())


def create_app() -> Flask:
    """A WSGI application that logs to HOOK_LOG."""
    app = Flask("hooksink", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    journal = Journal(log_path())
    hits: Counter[tuple[int, str]] = Counter()
    counting = threading.Lock()

    def receive() -> tuple[str, int]:
        body, webhook_id = request.get_data(), plain(request.headers.get("webhook-id", ""))
        headers = {name.lower(): value for name, value in request.headers.items()}
        wrong = signature.verify(headers, body, secrets(), time.time())
        if wrong is not None:
            journal.refused(webhook_id, wrong)
            return f"{wrong}\n", 401
        try:
            hook = json.loads(body)
            job_id, status = hook["job_id"], hook["status"]
        except (ValueError, TypeError, KeyError):
            return "not a hook of a job\n", 400
        journal.accepted(plain(job_id), plain(status), webhook_id)
        return "", 204

    @app.post("/", defaults={"path": ""})
    @app.post("/<path:path>")
    def take(path: str) -> tuple[str, int]:
        """Verifies and logs."""
        return receive()

    @app.post("/flaky/<int:times>")
    def flaky(times: int) -> tuple[str, int]:
        """503 so many times for each webhook id, then as usual."""
        tried = (times, request.headers.get("webhook-id", ""))
        with counting:
            hits[tried] += 1
            early = hits[tried] <= times
        return ("not yet\n", 503) if early else receive()

    @app.post("/slow/<float:seconds>")
    @app.post("/slow/<int:seconds>")
    def slow(seconds: float) -> tuple[str, int]:
        """Takes the hook, but answers so many seconds later."""
        taken = receive()
        time.sleep(min(seconds, MAX_SLOW_SECONDS))
        return taken

    @app.post("/status/<int:code>")
    def answer(code: int) -> tuple[str, int]:
        """Takes the hook, but answers with this status."""
        body, status = receive()
        if status == 401 or not 200 <= code <= 599:
            return body, status
        return "", code

    @app.get("/")
    def index() -> tuple[str, int, dict[str, str]]:
        """What this is."""
        return "hooksink takes POST requests; see hook.log\n", 200, {"Content-Type": "text/plain"}

    return app
