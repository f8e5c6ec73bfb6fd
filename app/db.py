"""The engine and `transaction()`: the only place, with the claim statements, that knows which database it is."""
from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from app import schema
from app.config import settings
from app.errors import WrongSetting
from app.turnstile import Turnstile, TurnTimeout

# How long a writer waits for its turn before the caller is told to come back. A turn takes milliseconds: whoever waits
# for a thousand of them waits for one that hangs. A proxy gives up after sixty seconds, as a rule.
LOCK_WAIT_SECONDS = 10.0
# A connection that was used so lately is not asked whether it is still there: the question is a round trip, and a busy
# process would ask it for each transaction.
_TRUSTED_SECONDS = 1.0
# Kept open when nobody needs them: transactions take milliseconds, so more than eight at a time are a peak. PostgreSQL
# counts idle ones too.
_POOL_SIZE = 8
# With the size as many as WEB_THREADS (those of WEB_WAITERS look in Redis, and seldom in SQL); four web processes and a
# courier fit into PostgreSQL's 100.
_POOL_OVERFLOW = 8
# The connection that was used last is taken first (`pool_use_lifo`): it knows the statements, and no more of them hold
# pages in memory than are used at one time.
# Of each connection's pages, as much as a transaction touches. More is of no use, since each commit of another process
# empties it, but is taken as the file grows: by default 2 MB for each of 16 connections.
_SQLITE_CACHE_KIB = 512
# A checkpoint waits for the disk twice, within the turn of the writer that it falls upon: so one for each thousand
# submissions, not for each two hundred, as by default. The log takes 16 MB instead of 4.
_SQLITE_LOG_PAGES = 4000
_SQLITE_OLDEST = (3, 51, 3)  # older ones can corrupt a WAL that several processes share

# SQLSTATE classes of PostgreSQL: connection, resources, lock not available, operator intervention, system error.
_AWAY_CLASSES = frozenset({"08", "53", "55", "57", "58"})
_READ_ONLY = "25006"  # a standby, say after a failover

_engine: Engine | None = None
_engine_pid = 0
_engine_lock = threading.Lock()
_turnstiles: WeakKeyDictionary[Engine, Turnstile] = WeakKeyDictionary()


def engine() -> Engine:
    """This process's engine. Made at first use, so never carried over a fork."""
    global _engine, _engine_pid
    if _engine is None or _engine_pid != os.getpid():
        with _engine_lock:
            if _engine is None or _engine_pid != os.getpid():
                _engine = _make(settings().database_url)
                _engine_pid = os.getpid()
    return _engine


def dispose() -> None:
    """Closes this process's connections; the next use makes new ones."""
    global _engine
    if _engine is not None and _engine_pid == os.getpid():
        _engine.dispose()
    _engine = None


@contextlib.contextmanager
def transaction() -> Iterator[Connection]:
    """A writing transaction: commits at the end of the block, rolls back on any exception.

    Keep it short: no network, no work of a job inside, no second one within. Raises
    `sqlalchemy.exc.OperationalError` when the database is away, or when others wrote for LOCK_WAIT_SECONDS.
    """
    if engine().dialect.name == "sqlite":
        with _turn(), engine().begin() as tx:
            yield tx
    else:
        with engine().begin() as tx:
            yield tx


@contextlib.contextmanager
def reading() -> Iterator[Connection]:
    """One consistent view for reading. Nothing is kept of what is written in it."""
    with engine().connect() as connection:
        with connection.execution_options(uketsuke_reading=True).begin() as view:
            yield connection
            view.rollback()


def describe() -> str:
    """Which database this is, with its version; a round trip."""
    with reading() as view:
        if view.dialect.name == "sqlite":
            return f"SQLite {view.exec_driver_sql('SELECT sqlite_version()').scalar_one()}"
        return f"PostgreSQL {view.exec_driver_sql('SHOW server_version').scalar_one()}"


def reason(error: BaseException) -> str:
    """Why the database refused, in a line without the rows' contents (PostgreSQL tells them in its DETAIL)."""
    cause = getattr(error, "orig", None) or error
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    return f"{type(cause).__name__}: {primary or cause}".splitlines()[0]


def is_away(error: Exception) -> bool:
    """Whether the database cannot be used now (away, locked, overloaded, read-only) rather than refuse this change."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return isinstance(error, OperationalError | PoolTimeout) or state == _READ_ONLY or state[:2] in _AWAY_CLASSES


def is_contended(error: Exception) -> bool:
    """Whether one row or lock was waited for in vain (55P03), or two waited for each other (40P01): what is refused
    then may be one of several changes."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) in ("55P03", "40P01")


def version() -> str | None:
    """The migration that the tables are the outcome of; None when there are none. Raises as any statement does."""
    try:
        with reading() as view:
            found: str | None = view.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
            return found
    except DBAPIError as error:
        if "alembic_version" not in str(error):
            raise
        return None


def check_tables() -> None:
    """Raises WrongSetting when the tables are not those of this version, or the file cannot be used. A server that is
    away proves nothing: the process starts, and waits for it."""
    try:
        found = version()
    except (DBAPIError, OSError) as error:
        if isinstance(error, OSError) or settings().database_url.startswith("sqlite"):
            raise WrongSetting(f"DATABASE_URL: {reason(error)}") from None
        return
    finally:
        dispose()
    if found != schema.REVISION:
        raise WrongSetting(f"DATABASE_URL: its tables are of version {found}, {schema.REVISION} is needed: make setup")


def use_wal() -> None:
    """Puts a SQLite file into WAL mode, for good. Raises WrongSetting where that cannot be (a network file system)."""
    raw = engine().raw_connection()
    try:
        mode = raw.cursor().execute("PRAGMA journal_mode=WAL").fetchone()[0]
    finally:
        raw.close()
    if mode != "wal":
        raise WrongSetting("DATABASE_URL: this file system cannot hold a database of several processes")


def _make(url: str) -> Engine:
    if make_url(url).get_backend_name() == "sqlite":
        return _make_sqlite(url)
    made = create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        pool_use_lifo=True,
        pool_timeout=LOCK_WAIT_SECONDS,
        hide_parameters=True,  # rows' contents stay out of logs and job errors
        connect_args={
            "connect_timeout": 5,  # half of LOCK_WAIT_SECONDS, so that a second address of a name is tried within it
            # A network that swallows everything is noticed as one that refuses is: no relay waits for it for ever.
            # After 10 + 3 x 5 s, or 20 s with something on its way: before a lease of 30 s is over.
            "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000,
            # Three times what a lock may take: no statement of a request or a job comes near it. Who stands still in a
            # transaction gives its locks back after twice a statement's time.
            "options": f"-c timezone=utc -c lock_timeout={int(LOCK_WAIT_SECONDS * 1000)} -c statement_timeout=30000"
            " -c idle_in_transaction_session_timeout=60000",
        },
    )
    event.listen(made, "checkin", _note_use)
    event.listen(made, "checkout", _ask_first(made.dialect))
    return made


def _note_use(_raw: Any, record: ConnectionPoolEntry) -> None:
    record.info["used_at"] = time.monotonic()


def _ask_first(dialect: Dialect) -> Callable[[Any, ConnectionPoolEntry, Any], None]:
    """A server that restarted costs nobody a request: a connection that has not been used for a moment is asked whether
    it is still one, and another takes its place if not."""

    def ask(raw: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("used_at", math.inf) > _TRUSTED_SECONDS:
            try:
                dialect.do_ping(raw)
            except dialect.loaded_dbapi.Error as error:
                raise DisconnectionError from error

    return ask


def _make_sqlite(url: str) -> Engine:
    from pysqlite3 import dbapi2

    if dbapi2.sqlite_version_info < _SQLITE_OLDEST:
        raise WrongSetting(f"SQLite {dbapi2.sqlite_version} is older than {'.'.join(map(str, _SQLITE_OLDEST))}")
    Path(make_url(url).database or "").parent.mkdir(parents=True, exist_ok=True)
    made = create_engine(
        url, module=dbapi2, pool_size=_POOL_SIZE, max_overflow=_POOL_OVERFLOW, pool_use_lifo=True, hide_parameters=True,
        connect_args={"check_same_thread": False, "timeout": LOCK_WAIT_SECONDS},
    )
    _turnstiles[made] = Turnstile(f"{made.url.database}.turn")
    event.listen(made, "connect", _prepare_sqlite)
    event.listen(made, "begin", _begin_sqlite)
    return made


def _prepare_sqlite(raw: Any, _record: Any) -> None:
    # The driver must not begin transactions of its own: `_begin_sqlite` does. WAL is set once, by the migrations.
    raw.isolation_level = None
    raw.execute("PRAGMA synchronous=FULL")  # a 202 survives a power cut
    raw.execute("PRAGMA foreign_keys=ON")
    raw.execute(f"PRAGMA cache_size=-{_SQLITE_CACHE_KIB}")
    raw.execute(f"PRAGMA wal_autocheckpoint={_SQLITE_LOG_PAGES}")


def _begin_sqlite(connection: Connection) -> None:
    # To the driver itself: for statements without parameters and rows SQLAlchemy takes ten times as long.
    driver = connection.connection.driver_connection
    assert driver is not None
    try:
        if connection.get_execution_options().get("uketsuke_reading"):
            driver.execute(f"PRAGMA busy_timeout={int(LOCK_WAIT_SECONDS * 1000)}")  # a writer left less
            driver.execute("BEGIN")
            return
        # IMMEDIATE: a deferred transaction that reads and then writes fails at once when another one wrote in between.
        driver.execute(f"PRAGMA busy_timeout={_wait.left_milliseconds()}")
        driver.execute("BEGIN IMMEDIATE")
    except connection.dialect.loaded_dbapi.Error as error:
        raise DBAPIError.instance("BEGIN", None, error, connection.dialect.loaded_dbapi.Error) from error


class _Wait(threading.local):
    """When this thread's wait for the writer's turn ends."""

    until: float = 0.0

    def left_milliseconds(self) -> int:
        return max(0, int((self.until - time.monotonic()) * 1000))


_wait = _Wait()


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """The writer's turn. What the queue took of the wait is no longer there for SQLite's own lock."""
    _wait.until = time.monotonic() + LOCK_WAIT_SECONDS
    try:
        with _turnstiles[engine()].turn(_wait.until):
            yield
    except TurnTimeout:
        raise OperationalError("BEGIN", None, TimeoutError("the database is held by another writer")) from None
