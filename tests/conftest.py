"""A world for each test: a database of its own, a Valkey that is empty, settings read anew."""
from __future__ import annotations

import ipaddress
import math
import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from app import addresses, config, db, gauges, kinds, metrics, outlook, redis_client, stack, waking
from tasks import sharing
from tests import promised, servers
from tests import receiver as receivers
from tests.processes import Site

PROCESS_SETTINGS = ("DATABASE_URL", "REDIS_URL", "BROKER_URL", "API_TOKENS", "JOB_MODULES", "HOST", "PORT")


@pytest.fixture(scope="session")
def valkey() -> Iterator[servers.Valkey]:
    with servers.valkey() as server:
        # Celery reads its configuration once a process, so this one server is the broker of every test.
        for name in PROCESS_SETTINGS:
            os.environ.pop(name, None)
        os.environ["REDIS_URL"] = server.url
        yield server


def pytest_configure() -> None:
    """A developer's `.env` is not the tests'; and a terminated run still stops what it started."""
    os.environ["ENV_FILE"] = ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


@dataclass
class World:
    """Where a test runs."""

    url: str
    var: Path
    redis: redis.Redis
    set: Callable[..., None]

    @property
    def dialect(self) -> str:
        return db.engine().dialect.name

    def sql(self, statement: str, **values: Any) -> list[Any]:
        """What a person would type into the database's own shell."""
        from sqlalchemy import text

        with db.transaction() as tx:
            result = tx.execute(text(statement), values)
            return list(result) if result.returns_rows else []

    def count(self, table: str, where: str = "1 = 1") -> int:
        return self.sql(f"SELECT count(*) FROM {table} WHERE {where}")[0][0]


def forget_settings() -> None:
    for cached in (config.settings, kinds.registry, addresses._policies):
        cached.cache_clear()
    metrics.forget()
    gauges.forget()


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Migrated databases, made once, to be copied."""
    return {}


def _migrated(url: str) -> None:
    os.environ["DATABASE_URL"] = url
    forget_settings()
    stack.migrate()
    db.dispose()
    del os.environ["DATABASE_URL"]


def _sqlite(request: pytest.FixtureRequest, tmp_path: Path, templates: dict[str, str]) -> str:
    if "sqlite" not in templates:
        file = request.getfixturevalue("tmp_path_factory").mktemp("template") / "jobs.sqlite3"
        _migrated(f"sqlite:///{file}")
        templates["sqlite"] = str(file)
    copy = tmp_path / "jobs.sqlite3"
    with sqlite3.connect(templates["sqlite"]) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    source.close()
    target.close()
    return f"sqlite:///{copy}"


def _postgresql(request: pytest.FixtureRequest, templates: dict[str, str]) -> str:
    server: servers.Postgres = request.getfixturevalue("postgres")
    if "postgresql" not in templates:
        name = server.new_database()
        _migrated(server.url(name))
        templates["postgresql"] = name
    return server.url(server.new_database(templates["postgresql"]))


@pytest.fixture(params=["sqlite", "postgresql"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, valkey: servers.Valkey, templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """A migrated, empty database of each sort, and everything that reads settings made new."""
    url = _sqlite(request, tmp_path, templates) if request.param == "sqlite" else _postgresql(request, templates)

    def change(**settings: Any) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        forget_settings()

    change(DATABASE_URL=url, REDIS_URL=valkey.url, VAR_DIR=tmp_path / "var", CALLBACK_SCHEDULE_SECONDS="0,5,300",
           PROMETHEUS_MULTIPROC_DIR=tmp_path / "var" / "metrics")
    client = redis.Redis.from_url(valkey.url, decode_responses=True)
    client.flushall()
    redis_client._away_until, redis_client._trouble_at = 0.0, -math.inf
    outlook.forget()
    sharing.forget()
    # No relay runs in a test's own process: rows wait for a claim, as when Redis is away. Real processes hand them
    # over, and so does tests/test_handing_over.py.
    monkeypatch.setattr(waking, "leased_until", lambda now: None)
    try:
        yield World(url, tmp_path / "var", client, change)
    finally:
        db.dispose()
        client.close()
        if request.param == "postgresql":
            request.getfixturevalue("postgres").drop(url)
        forget_settings()


@pytest.fixture
def api(world: World) -> FlaskClient:
    """A client of the application, without a server in between; each answer is held to the OpenAPI document."""
    from app.api import create_app

    return promised.client(create_app())


@pytest.fixture
def receiver(world: World) -> Iterator[receivers.Receiver]:
    """A callback receiver that CALLBACK_ALLOW opens."""
    with receivers.receiver() as told:
        world.set(CALLBACK_ALLOW=f"127.0.0.1:{told.port}")
        yield told


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test speaks to any other machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        assert isinstance(address, str) or ipaddress.ip_address(address[0]).is_loopback or address[0] == "localhost"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


one_database = pytest.mark.parametrize("world", ["sqlite"], indirect=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on an outside Redis, with each database."""
    shared: servers.Valkey = request.getfixturevalue("valkey")
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    settings: dict[str, Any] = {
        "REDIS_URL": shared.url, "JOB_MODULES": "tests.slow_kinds", "LEASE_SECONDS": 2, "RESCUE_INTERVAL_SECONDS": 1,
        "TRACE_LOG": tmp_path / "trace.log"}
    if request.param == "postgresql":
        server: servers.Postgres = request.getfixturevalue("postgres")
        settings["DATABASE_URL"] = server.url(server.new_database())
    with Site(tmp_path, **settings) as made:
        yield made
