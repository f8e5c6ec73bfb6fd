"""The Procfile's `hooksink`: `python -m hooksink`, on loopback."""
from __future__ import annotations

import os
import socket
import sys

from dotenv import load_dotenv
from granian import Granian
from granian.constants import Interfaces
from granian.log import LogLevels

from hooksink import server

HOST = "127.0.0.1"
DEFAULT_PORT = 8141
THREADS = 64  # a slow hook holds one; as many as a courier has


def main() -> int:
    """Serves until SIGTERM or SIGINT; says in one line why it cannot."""
    load_dotenv(os.environ.get("ENV_FILE", ".env") or os.devnull)
    given = os.environ.get("HOOKSINK_PORT") or str(DEFAULT_PORT)
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= 65535:
        print(f"hooksink: HOOKSINK_PORT={given!r} cannot be used: 1 to 65535", file=sys.stderr)
        return 2
    try:
        server.check()
    except (ValueError, OSError) as error:
        print(f"hooksink: {error}", file=sys.stderr)
        return 2
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(given)))
        except OSError:
            print(f"hooksink: port {given} is taken: choose another with HOOKSINK_PORT", file=sys.stderr)
            return 2
    print(f"hooksink on http://{HOST}:{given}", flush=True)
    Granian(
        "hooksink.server:create_app", factory=True, interface=Interfaces.WSGI, websockets=False, address=HOST,
        port=int(given), workers=1, blocking_threads=THREADS, log_level=LogLevels.error,
    ).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
