"""Who runs against whom: the names of the table, how each is installed, and all of them up at once."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import asking, installations, stores
from bench.installations import Installation, Peer
from tests import servers

OURS, OURS_POSTGRESQL = "uketsuke, SQLite", "uketsuke, PostgreSQL"
BARE = "bare Flask route"
CELERY, CELERY_ALWAYS = "Flask + Celery", "Flask + Celery, Redis AOF fsync always"
RQ, DRAMATIQ = "Flask + RQ", "Flask + Dramatiq, 2 x 8 threads"
HUEY_SQLITE, HUEY_REDIS = "Flask + Huey, SQLite", "Flask + Huey, Redis"
PROCRASTINATE = "Flask + Procrastinate, PostgreSQL"
PEERS = (CELERY, CELERY_ALWAYS, RQ, HUEY_SQLITE, HUEY_REDIS, DRAMATIQ, PROCRASTINATE)
FOR_ORIENTATION = frozenset({RQ, HUEY_SQLITE, HUEY_REDIS, DRAMATIQ})  # no target names them: they run once

_CELERY = Peer(
    "bench.peers.flask_celery",
    ("celery", "--app", "bench.peers.flask_celery:celery", "worker", "--concurrency", "2"),
    finished=lambda store: store.results.dbsize(), waiting=lambda store: store.jobs.llen("celery"), tables=True)
_RQ = Peer(
    "bench.peers.flask_rq", ("rq.cli", "worker", "--url", "{REDIS_URL}"), processes=2,
    finished=lambda store: store.jobs.zcard("rq:finished:default"),
    waiting=lambda store: store.jobs.llen("rq:queue:default"))
_HUEY = ("huey.bin.huey_consumer", "bench.peers.flask_huey.huey", "--workers", "2", "--worker-type", "process")
_HUEY_REDIS = Peer(
    "bench.peers.flask_huey", _HUEY,
    finished=lambda store: store.jobs.hlen("huey.results.jobs"),
    waiting=lambda store: store.jobs.llen("huey.redis.jobs"))
_HUEY_SQLITE = Peer(
    "bench.peers.flask_huey", _HUEY,
    finished=lambda store: store.one("SELECT count(*) FROM kv"),
    waiting=lambda store: store.one("SELECT count(*) FROM task"))
_DRAMATIQ = Peer(
    "bench.peers.flask_dramatiq", ("dramatiq", "bench.peers.flask_dramatiq"),
    finished=lambda store: store.results.dbsize(), waiting=lambda store: store.jobs.llen("dramatiq:default"))
_COUNT = "SELECT count(*) FROM procrastinate_jobs WHERE task_name = 'primes' AND status = "
_PROCRASTINATE = Peer(
    "bench.peers.flask_procrastinate", ("procrastinate", "--app", "bench.peers.flask_procrastinate.jobs", "worker"),
    processes=2, application="create_app", factory=True, tables=True,
    finished=lambda store: store.one(f"{_COUNT}'succeeded'"), waiting=lambda store: store.one(f"{_COUNT}'todo'"))
_BARE = Peer("bench.peers.bare", (), finished=lambda store: 0, waiting=lambda store: 0)


def _as_installed(folder: Path) -> stores.Redis:
    return stores.Redis(folder, stores.AS_INSTALLED)


def install(name: str, server: servers.Postgres | None = None, **settings: str) -> Installation:
    """The contender of this name, with nothing started but its stores; `server` for those that need a PostgreSQL,
    the settings for ours."""
    recipes: dict[str, Callable[[], Installation]] = {
        OURS: lambda: installations.ours(None, **settings),
        OURS_POSTGRESQL: lambda: installations.ours(_given(server), **settings),
        BARE: lambda: installations.of(_BARE, _as_installed),
        CELERY: lambda: installations.of(_CELERY, _as_installed),
        CELERY_ALWAYS: lambda: installations.of(_CELERY, lambda folder: stores.Redis(folder, stores.ALWAYS)),
        RQ: lambda: installations.of(_RQ, _as_installed),
        HUEY_REDIS: lambda: installations.of(_HUEY_REDIS, _as_installed),
        HUEY_SQLITE: lambda: installations.of(_HUEY_SQLITE, lambda folder: stores.Sqlite(folder / "huey.sqlite3")),
        DRAMATIQ: lambda: installations.of(_DRAMATIQ, _as_installed),
        PROCRASTINATE: lambda: installations.of(_PROCRASTINATE, lambda folder: stores.Database(_given(server))),
    }
    return recipes[name]()


def _given(server: servers.Postgres | None) -> servers.Postgres:
    assert server is not None, "needs a PostgreSQL"
    return server


class Fleet:
    """Contenders that are all up at the same time until the stack is closed. Several measures share them: each is
    started once."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._server: servers.Postgres | None = None
        self._up: dict[str, Installation] = {}
        self._working: set[str] = set()

    def up(self, names: Sequence[str], workers: bool) -> dict[str, Installation]:
        """These, with workers that have worked off a job, or without workers."""
        self._start([name for name in names if name not in self._up])
        chosen = {name: self._up[name] for name in names}
        for name, each in chosen.items():
            if workers and name not in self._working and name != BARE:
                each.start_workers()
            if not workers:
                each.kill("workers")
        for name in set(names) - self._working - {BARE} if workers else ():
            asking.finished_job(chosen[name])
        self._working = self._working | set(names) if workers else self._working - set(names)
        return chosen

    def _start(self, names: Sequence[str]) -> None:
        if self._server is None:
            self._server = self._stack.enter_context(stores.postgres())
        with ThreadPoolExecutor(4) as pool:  # much of a start is waiting
            self._up |= zip(names, pool.map(self._start_one, names))

    def _start_one(self, name: str) -> Installation:
        installed = install(name, self._server)
        self._stack.callback(installed.close)
        installed.start_web()
        return installed
