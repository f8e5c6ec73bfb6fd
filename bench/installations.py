"""A contender, installed in a folder of its own: its store, its web and its workers, each started and stopped alone."""
from __future__ import annotations

import abc
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pysqlite3 import dbapi2

from bench import stores
from tests import servers
from tests.processes import ROOT, Process, Site
from tests.servers import wait_until

WORKERS = 2  # processes that run jobs, of everybody
_OURS_UNFINISHED = "SELECT count(*) FROM jobs WHERE status IN ('queued', 'running')"
_OURS_UNPUBLISHED = "SELECT count(*) FROM outbox WHERE state IN ('waiting', 'leased')"


@dataclass(frozen=True)
class Peer:
    """How the program of a peer is run, and how its store says what has become of the jobs."""

    module: str
    worker: tuple[str, ...]  # python -m ..., with what the environment holds in braces
    finished: Callable[[Any], int]  # how many jobs its store shows as done
    waiting: Callable[[Any], int]  # how many of them its workers would still take
    processes: int = 1  # how often that command is run: most start their worker processes themselves
    application: str = "app"  # the WSGI application in the module
    factory: bool = False
    tables: bool = False  # whether its module's `create_tables()` comes first


@dataclass
class Installation(abc.ABC):
    """What every contender has in common."""

    port: int
    store: Any
    folder: Path
    processes: dict[str, list[Process]] = field(default_factory=dict)
    ours: ClassVar[bool] = False
    accepted: int = 0  # submissions that were answered 202: whoever submits adds to it

    @abc.abstractmethod
    def start_web(self) -> None:
        """Returns when it answers."""

    @abc.abstractmethod
    def start_workers(self) -> None:
        """Returns at once."""

    def kill(self, part: str) -> None:
        """kill -9 of `web` or `workers`, with all that descends from them."""
        for process in self.processes.pop(part, []):
            process.kill()

    @abc.abstractmethod
    def unfinished(self) -> int:
        """How many of the accepted jobs are not final."""

    @abc.abstractmethod
    def waiting(self) -> int:
        """How many jobs a worker would still run, as the store says."""

    def failed(self) -> int:
        """How many jobs have failed, where the store can say so cheaply."""
        return 0

    def settled(self) -> bool:
        """Whether nothing goes on by itself any more while no worker runs."""
        return True

    def close(self) -> None:
        """Stops everything and leaves nothing."""
        for part in list(self.processes):
            self.kill(part)
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def said(self) -> str:
        """The end of what its processes wrote."""
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
                         for file in sorted(self.folder.glob("*.log")))


@dataclass
class _OfPeer(Installation):
    peer: Peer = None  # type: ignore[assignment]
    env: dict[str, str] = field(default_factory=dict)

    def start_web(self) -> None:
        module = f"{self.peer.module}:{self.peer.application}"
        self._run("web", "granian", "--interface", "wsgi", "--http", "1", "--no-ws", "--workers", "2",
                  "--blocking-threads", "4", "--port", str(self.port), *["--factory"] * self.peer.factory, module)
        wait_until(lambda: _listens(self.port), 60, f"{self.peer.module} answers")

    def start_workers(self) -> None:
        for _ in range(self.peer.processes):
            self._run("workers", *(word.format_map(self.env) for word in self.peer.worker))

    def _run(self, part: str, *command: str) -> None:
        begun = self.processes.setdefault(part, [])
        argv = [sys.executable, "-m", *command]
        begun.append(Process(part, argv, self.env, self.folder / f"{part}-{len(begun)}.log"))

    def unfinished(self) -> int:
        return self.accepted - self.peer.finished(self.store)

    def waiting(self) -> int:
        return self.peer.waiting(self.store)


@dataclass
class _OfOurs(Installation):
    ours: ClassVar[bool] = True
    site: Site = None  # type: ignore[assignment]
    database: stores.Database | None = None  # None: SQLite

    def start_web(self) -> None:
        self.processes["web"] = [self.site.start("web", "courier", "beat")]
        self.site.wait_answering(60)

    def start_workers(self) -> None:
        self.processes["workers"] = [self.site.start("worker")]

    def unfinished(self) -> int:
        return self._one(_OURS_UNFINISHED)

    def waiting(self) -> int:
        return self._one(_OURS_UNFINISHED)

    def failed(self) -> int:
        return self._one("SELECT count(*) FROM jobs WHERE status = 'failed'")

    def settled(self) -> bool:
        return self._one(_OURS_UNPUBLISHED) == 0

    def _one(self, statement: str) -> int:
        if self.database is not None:
            return self.database.one(statement)
        with contextlib.closing(dbapi2.connect(self.folder / "jobs.sqlite3", timeout=30)) as connection:
            return connection.execute(statement).fetchone()[0]

    def close(self) -> None:
        super().close()
        self.site.session.close()
        if self.database is not None:
            self.database.close()


def ours(server: servers.Postgres | None, **settings: Any) -> Installation:
    """This program on SQLite, or on a PostgreSQL, with a Valkey as it embeds it and else as it is set up by default."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    database = None if server is None else stores.Database(server)
    redis = stores.Redis(folder, None)
    settings |= {"DATABASE_URL": database.url} if database else {}
    site = Site(folder, REDIS_URL=redis.url, WORKER_CONCURRENCY=WORKERS, **settings)
    return _OfOurs(site.port, _Both(redis, database), folder, site=site, database=database)


class _Both:
    """Our Valkey, and our database when that is a server."""

    def __init__(self, redis: stores.Redis, database: stores.Database | None) -> None:
        self.all: list[Any] = [redis, *([database] if database else [])]

    def kill(self) -> None:
        for store in self.all:
            store.kill()

    def start_again(self) -> None:
        for store in self.all:
            store.start_again()

    def close(self) -> None:
        self.all[0].close()


def of(peer: Peer, new_store: Callable[[Path], Any], **more: str) -> Installation:
    """A peer on a store of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    store = new_store(folder)
    plain = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    env = {**plain, **store.env, **more}
    if peer.tables:
        env.setdefault("SQLITE_FILE", str(folder / "app.sqlite3"))
        makes = f"import {peer.module} as peer; peer.create_tables()"
        subprocess.run([sys.executable, "-c", makes], cwd=ROOT, env=env, check=True, timeout=60)
    return _OfPeer(servers.free_port(), store, folder, peer=peer, env=env)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
