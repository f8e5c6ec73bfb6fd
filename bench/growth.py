"""Whether work costs the same when tables are full: 1,000,000 finished and 200,000 waiting jobs, or one of each.

Each operation is done by the real functions in this process, on an empty database and on a full one in turn. Told is
the processor time that one of them takes, ours and the database's together, in microseconds: so other programs on the
machine do not count. `handed over` is what the relay does with rows that a wake token names, and `relay` with those
that it has to claim. `job` is a claim and an end. Empty is a database with one job that waits, as the rescue has
nothing to ask when nobody waits for anything. `outlook` is what a process looks up at most once a second, and for at
most 3 % of the time, and stops at the 500 places of a queue that it looks at one by one: no target names it.

`python -m bench.growth` prints figures and ratios; FINISHED and WAITING make it smaller.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import text

from app import addresses, clock, config, db, kinds, outlook, stack, status, submissions, waking
from app.api import create_app
from bench.figures import Target
from tasks import prune_expired, relay_outbox, rescue_stalled, run_job
from tests import crowd, servers

FINISHED = int(os.environ.get("FINISHED", 1_000_000))
WAITING = int(os.environ.get("WAITING", 200_000))
REPEATS = int(os.environ.get("REPEATS", 7))
_BLOCKS = 4  # of a run: what counts is their median, as one of them may hold somebody's pause
_TIMES = 40  # that an operation is done in a block
_WAITS = text("UPDATE outbox SET state = 'waiting', published_at = NULL WHERE task = 'run_job' AND target_id = :job_id")
_LOOKS = 5  # of what is done once in a while

OPERATIONS = ("submit", "poll", "handed over", "relay", "job", "rescue", "prune", "outlook")
TARGETS = [
    Target(f"growth: {operation}", f"{operation} us", f"{database}, full", f"{database}, empty", at_most=1.15)
    for database in ("sqlite", "postgresql") for operation in OPERATIONS if operation != "outlook"]


def contenders(kept: contextlib.ExitStack) -> dict[str, Callable[[], dict[str, float]]]:
    """A database of each sort and filling, each with a run of all operations."""
    folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
    valkey = kept.enter_context(servers.valkey())
    config.settings.cache_clear()
    os.environ |= {"ENV_FILE": "", "REDIS_URL": valkey.url, "MAX_BACKLOG": str(10 * WAITING + 100_000)}
    postgres = kept.enter_context(servers.postgres())
    # As an installation that keeps what it was given: this server of the tests does not.
    postgres.execute("ALTER SYSTEM SET fsync = on")
    postgres.execute("SELECT pg_reload_conf()")
    found = {}
    for database, filling in itertools.product(("sqlite", "postgresql"), ("empty", "full")):
        url = (f"sqlite:///{folder}/{filling}.sqlite3" if database == "sqlite"
               else postgres.url(postgres.new_database()))
        with _at(url, folder / filling):
            stack.migrate()
            _fill(database, *((FINISHED, WAITING) if filling == "full" else (1, 1)))
        found[f"{database}, {filling}"] = _run(url, folder / filling)
    return found


def _fill(database: str, finished: int, waiting: int) -> None:
    began = time.monotonic()
    # Published after all that is measured: else the rescue would take them for lost, as it should.
    crowd.fill(finished, waiting, finished // 10, published_ago_seconds=-3600)
    if database == "postgresql":
        with db.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")  # as autovacuum has in an installation of that age
    print(f"{database}: {finished} and {waiting} jobs in {time.monotonic() - began:.0f} s", file=sys.stderr)


@contextlib.contextmanager
def _at(url: str, var: Path) -> Iterator[None]:
    """Everything in this process uses this database."""
    os.environ |= {"DATABASE_URL": url, "VAR_DIR": str(var)}
    for cached in (config.settings, kinds.registry, addresses._policies):
        cached.cache_clear()
    outlook.forget()
    try:
        yield
    finally:
        db.dispose()


def _run(url: str, var: Path) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        with _at(url, var):
            return _measure()

    return run


def _measure() -> dict[str, float]:
    api = create_app().test_client()
    for _ in range(10):  # statements are compiled, connections made
        _one_of_each(api)
    outlook.latest()
    outlook._look_again_at = float("inf")  # what that costs is told by itself
    outlook._latest = outlook.Outlook()
    pids = _servers()
    blocks = [_block(api, pids) for _ in range(_BLOCKS)]
    return {f"{operation} us": statistics.median(block[operation] for block in blocks) for operation in OPERATIONS}


def _block(api: Any, pids: list[int]) -> dict[str, float]:
    """Microseconds of each operation."""
    made: list[str] = []

    def each(operation: Callable[[str], Any]) -> float:
        jobs = iter(made)
        return _cost(lambda: operation(next(jobs)), _TIMES, pids)

    return {
        "submit": _cost(lambda: made.append(_submit()), _TIMES, pids),
        "handed over": _cost(_pass_on, 1, pids) / _TIMES,
        "relay": _cost(_relay_lost(made), 1, pids) / _TIMES,
        "poll": each(lambda job_id: _poll(api, job_id)),
        "job": each(run_job.run_once),
        "rescue": _cost(lambda: rescue_stalled.run_once(clock.now(), {}), _LOOKS, pids),
        "prune": _cost(lambda: prune_expired.run_once(clock.now()), _LOOKS, pids),
        "outlook": _cost(_look, _LOOKS, pids),
    }


def _one_of_each(api: Any) -> None:
    job_id = _submit()
    _pass_on()
    _relay_lost([job_id])()
    _poll(api, job_id)
    run_job.run_once(job_id)
    rescue_stalled.run_once(clock.now(), {})
    prune_expired.run_once(clock.now())
    _look()


def _submit() -> str:
    kind = kinds.registry()["primes"]
    return submissions.submit_job(config.EVERYBODY, kind, {"n": 5}, None, None, clock.now()).job_id


def _publish(*rows: Any) -> None:
    """Takes it."""


def _pass_on() -> None:
    unmarked = relay_outbox.Unmarked()
    relay_outbox.pass_on(_publish, waking.take(), clock.now, contextlib.nullcontext, unmarked)
    relay_outbox._mark(unmarked, clock.now())


def _relay_lost(made: list[str]) -> Callable[[], Any]:
    """As if nobody had taken the tokens of these."""
    with db.transaction() as tx:
        for job_id in made:
            tx.execute(_WAITS, {"job_id": job_id})
    return lambda: relay_outbox.drain(_publish)


def _poll(api: Any, job_id: str) -> None:
    """As when the view does not know it: SQL answers."""
    status.forget([job_id])
    assert api.get(f"/jobs/{job_id}").status_code == 200


def _look() -> None:
    with db.reading() as view:
        outlook.look(view, clock.now(), [], outlook._latest)


def _cost(operation: Callable[[], Any], times: int, pids: list[int]) -> float:
    """Microseconds of processor time for one, ours and that of these processes."""
    began = _processor_seconds(pids)
    for _ in range(times):
        operation()
    return (_processor_seconds(pids) - began) / times * 1e6


def _processor_seconds(pids: list[int]) -> float:
    return time.process_time() + sum(map(_of, pids))


def _servers() -> list[int]:
    """The server's processes that work for us."""
    if db.engine().dialect.name != "postgresql":
        return []
    with db.reading() as view:
        return list(view.exec_driver_sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend'").scalars())


def _of(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0


def main() -> None:
    """Runs all in turn and prints medians and ratios."""
    with contextlib.ExitStack() as kept:
        runs = contenders(kept)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for _ in range(REPEATS):
            for name, run in runs.items():
                found[name].append(run())
    for name in found:
        if name.endswith("full"):
            for figure in found[name][0]:
                full, empty = (statistics.median(one[figure] for one in found[each])
                               for each in (name, name.replace("full", "empty")))
                print(f"{name} {figure}: {full:.0f} against {empty:.0f}, {full / empty:.2f}")


if __name__ == "__main__":
    main()
