"""The walls of the house: who may know whom, and whether papers and tables say the same."""
from __future__ import annotations

import ast
import contextlib
import fcntl
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from flask.testing import FlaskClient
from pysqlite3 import dbapi2
from sqlalchemy.exc import OperationalError

from app import db, kinds, schema, stack, states
from app.errors import WrongSetting
from app.turnstile import Turnstile
from tests.conftest import World
from tests.receiver import Receiver
from tests.running import finish
from tests.servers import wait_until

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("app", "tasks", "hooksink") for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_the_migrations_make_the_tables_of_the_schema(world: World) -> None:
    with db.reading() as view:
        assert compare_metadata(MigrationContext.configure(view), schema.metadata) == []


def test_migrating_twice_changes_nothing(world: World) -> None:
    world.sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")
    stack.migrate()
    assert world.count("notes") == 1


def test_tables_of_the_version_before_are_brought_up_with_their_rows(
    api: FlaskClient, world: World, receiver: Receiver,
) -> None:
    finish(api, receiver.url + "/a?job=1")
    finish(api, receiver.url + "/é?job=2")
    before = world.sql("SELECT id, url, endpoint, next_attempt_at FROM deliveries ORDER BY id")
    alembic = Config()
    alembic.set_main_option("script_location", str(ROOT / "app" / "migrations"))
    db.dispose()
    command.downgrade(alembic, "0002")
    stack.migrate()
    assert world.sql("SELECT id, url, endpoint, next_attempt_at FROM deliveries ORDER BY id") == before
    with db.reading() as view:
        assert compare_metadata(MigrationContext.configure(view), schema.metadata) == []


def test_sqlite_is_durable_and_shared(world: World) -> None:
    if world.dialect != "sqlite":
        return
    pragmas = {name: world.sql(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous", "foreign_keys")}
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    assert tuple(map(int, db.describe().split()[1].split("."))) >= (3, 51, 3)


def test_the_schema_names_its_migration(world: World) -> None:
    assert world.sql("SELECT version_num FROM alembic_version") == [(schema.REVISION,)]
    db.check_tables()


@pytest.mark.parametrize("statement", ["UPDATE alembic_version SET version_num = '0000'", "DROP TABLE alembic_version"])
def test_tables_of_another_version_stop_the_start(world: World, statement: str) -> None:
    world.sql(statement)
    with pytest.raises(WrongSetting, match="make setup"):
        db.check_tables()


def test_a_database_that_is_away_does_not_stop_the_start(world: World) -> None:
    db.dispose()
    world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    db.check_tables()


def test_a_writer_from_outside_cannot_come_between_reading_and_writing(world: World) -> None:
    """Another program that writes to the file waits for its turn; a deferred transaction would fail at its write."""
    if world.dialect != "sqlite":
        return

    def write() -> None:
        began.set()
        with contextlib.closing(dbapi2.connect(world.url.removeprefix("sqlite:///"), timeout=20)) as raw, raw:
            raw.execute("UPDATE notes SET owner = 'outside'")

    began, outside = threading.Event(), threading.Thread(target=write)
    world.sql("INSERT INTO notes (owner, text, created_at) VALUES ('x', 'x', '2026-01-01 00:00:00')")
    with db.transaction() as tx:
        tx.exec_driver_sql("SELECT owner FROM notes").all()
        outside.start()
        assert began.wait(20)
        outside.join(0.3)
        tx.exec_driver_sql("UPDATE notes SET owner = 'inside'")
    outside.join()
    assert world.sql("SELECT owner FROM notes") == [("outside",)]


def test_a_writer_that_never_ends_is_not_waited_for_longer_than_promised(world: World, monkeypatch: Any) -> None:
    if world.dialect != "sqlite":
        return
    monkeypatch.setattr(db, "LOCK_WAIT_SECONDS", 0.3)
    with contextlib.closing(dbapi2.connect(world.url.removeprefix("sqlite:///"))) as raw:
        raw.isolation_level = None
        raw.execute("BEGIN IMMEDIATE")
        began, failed = time.monotonic(), []

        def write() -> None:
            try:
                world.sql("UPDATE notes SET owner = 'x'")
            except OperationalError:
                failed.append(time.monotonic() - began)

        threads = [threading.Thread(target=write) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failed) == 10 and max(failed) < 2  # not ten waits, one after the other


def test_a_queue_held_elsewhere_costs_one_thread_and_no_more(world: World, monkeypatch: Any) -> None:
    """A process that hangs in mid-transaction: stopped, or in a long transactional function."""
    if world.dialect != "sqlite":
        return
    monkeypatch.setattr(db, "LOCK_WAIT_SECONDS", 0.3)
    ended: dict[str, list[float]] = {"failed": [], "written": []}
    with open(world.url.removeprefix("sqlite:///") + ".turn", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()

        def write() -> None:
            try:
                world.sql("UPDATE notes SET owner = 'x'")
                ended["written"].append(time.monotonic() - began)
            except OperationalError:
                ended["failed"].append(time.monotonic() - began)

        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(ended["failed"]) == 7)
        assert max(ended["failed"]) < 5 and not ended["written"]
    for thread in threads:
        thread.join()
    assert len(ended["written"]) == 1
    world.sql("UPDATE notes SET owner = 'x'")


class TooLong(Exception):
    """A time limit, raised by a signal's handler."""


def test_a_time_limit_in_the_queue_leaves_it_to_the_others(tmp_path: Path) -> None:
    turnstile, held, let_go = Turnstile(str(tmp_path / "turn")), threading.Event(), threading.Event()

    def hold() -> None:
        with turnstile.turn(time.monotonic() + 10):
            held.set()
            let_go.wait(20)

    def limit(*_: Any) -> None:
        raise TooLong

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    before = signal.signal(signal.SIGALRM, limit)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TooLong):
            with turnstile.turn(time.monotonic() + 10):
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    let_go.set()
    holder.join()
    for _ in range(3):
        with turnstile.turn(time.monotonic() + 5):
            pass


def test_writers_of_a_process_are_served_in_order(tmp_path: Path) -> None:
    turnstile, served = Turnstile(str(tmp_path / "turn")), []

    def write(number: int) -> None:
        with turnstile.turn(time.monotonic() + 20):
            served.append(number)

    with turnstile.turn(time.monotonic() + 5):
        threads = []
        for number in range(8):
            threads.append(threading.Thread(target=write, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(turnstile._waiting) == number + 1)
    for thread in threads:
        thread.join()
    assert served == list(range(8))


def test_an_unknown_word_cannot_be_stored(world: World) -> None:
    from sqlalchemy.exc import IntegrityError

    with pytest.raises(IntegrityError):
        world.sql("INSERT INTO outbox (task, target_id, queue, state, available_at, created_at) "
                  "VALUES ('run_job', 'x', 'q', 'sent', '2026-01-01 00:00:00', '2026-01-01 00:00:00')")


def test_the_drawn_moves_are_the_allowed_ones() -> None:
    drawn = (ROOT / "docs" / "architecture.md").read_text().split('state "job" as j')[1].split("```")[0]
    moves = re.findall(r"(\w+) --> (\w+):", drawn)
    assert set(moves) == {(before, after) for before, afters in states.JOB_MOVES.items() for after in afters}
    assert set(states.JOB_MOVES) == set(states.JOB_STATUSES)
    assert all(states.JOB_MOVES[status] == frozenset() for status in states.FINAL)


def test_every_link_of_the_papers_leads_somewhere() -> None:
    for paper in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")):
        for target in re.findall(r"\]\(([^)#]+)", paper.read_text()):
            assert "://" in target or (paper.parent / target).exists(), f"{paper.name}: {target}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    known, room = imports(path), path.relative_to(ROOT)
    top = {name.split(".")[0] for name in known}
    if room.parts[0] == "app":
        assert not top & {"tasks", "celery", "kombu", "hooksink"}
        if room.parts[1] != "api":
            assert "flask" not in top and not any(name.startswith("app.api") for name in known)
    if room.parts[0] == "tasks":
        assert "flask" not in top and not any(name.startswith("app.api") for name in known)
    if room.parts[:2] == ("app", "outbox.py"):  # it calls nobody
        ours = {name for name in known if name.startswith("app")}
        assert ours == {"app", "app.statements", "app.states", "app.schema", "app.schema.guard", "app.schema.outbox"}
    if room.parts[0] == "hooksink":
        assert not top & {"app", "tasks"}


def test_there_is_one_door_to_the_broker() -> None:
    doors = [path.name for path in SOURCES if
             any(word in path.read_text() for word in ("apply_async", "send_task", "create_task_message"))]
    assert doors == ["publishing.py"]
    for path in SOURCES:
        assert not any(word in path.read_text() for word in ("countdown=", "eta=", ".retry(", ".delay("))


def test_tasks_imports_nothing() -> None:
    assert imports(ROOT / "tasks" / "__init__.py") == set()


def test_importing_the_api_opens_no_connection() -> None:
    program = "import app.api; from app import db; app.api.create_app(); print(db._engine)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "None"


def test_the_built_in_kinds_are_registered_like_any_other(world: World) -> None:
    assert {kind.function.__module__ for kind in kinds.registry().values()} == set(kinds.BUILT_IN)


def test_the_lock_files_hold_what_setup_cfg_asks_for() -> None:
    import configparser
    import re

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for wanted, lock in ((config["options"]["install_requires"], "requirements.lock"),
                         (config["options.extras_require"]["dev"], "requirements-dev.lock")):
        locked = {line.split("==")[0].lower() for line in (ROOT / lock).read_text().splitlines() if "==" in line}
        names = {re.split(r"[\[ ><=]", line)[0].lower() for line in wanted.split("\n") if line}
        assert names <= locked
