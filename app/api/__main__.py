"""The Procfile's `web`: this application behind granian. `python -m app.api`."""
from __future__ import annotations

import logging
import sys

from flask import Flask
from granian import Granian
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels

from app import config, db, kinds, logs, ports
from app.api import create_app, shutdown
from app.errors import UketsukeError, WrongSetting

_MAX_HEAD_BYTES = 64 * 1024  # request line and headers; beyond them 414 or 431

log = logging.getLogger("uketsuke.api")


def application() -> Flask:
    """What each of the web processes serves."""
    logs.configure("web")
    shutdown.listen()
    return create_app()


def main() -> int:
    """Serves until SIGTERM or SIGINT; says in one line why it cannot."""
    logs.configure("web")
    try:
        settings = config.settings()
        kinds.registry()
        if not ports.is_free(settings.host, settings.port):
            raise WrongSetting(f"port {settings.port} is taken: choose another with PORT")
        db.check_tables()
    except (UketsukeError, OSError) as error:
        print(f"web: {error}", file=sys.stderr)
        return 2
    if not settings.api_tokens:
        log.warning("API_TOKENS is not set: the API is open to whoever reaches it")
    log.info("listening", extra={"address": ports.url(settings.host, settings.port)})
    # `backlog`: connections that wait to be taken, two thirds of what is accepted in a second if each brings one
    # submission. `workers_kill_timeout`: the longest that a request waits for the database (`db.LOCK_WAIT_SECONDS`);
    # those that Prefer: wait holds back end at once.
    Granian(
        "app.api.__main__:application", factory=True, interface=Interfaces.WSGI, http=HTTPModes.http1,
        websockets=False,
        address=settings.host, port=settings.port, workers=settings.web_workers,
        blocking_threads=settings.web_threads + settings.web_waiters,
        http1_settings=HTTP1Settings(max_buffer_size=_MAX_HEAD_BYTES), backlog=1024, respawn_failed_workers=True,
        workers_kill_timeout=10, log_dictconfig=logs.configuration("web"), log_level=LogLevels.error,
    ).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
