"""`make chaos`: a storm of faults on real processes while clients submit, repeat and poll and a receiver counts; at the
end a table, in which nothing may be lost and nothing may have taken effect twice.

SEED repeats a storm (its faults, their order, what the clients send), DATABASE is sqlite, postgresql or both, ROUNDS is
how often each fault comes, SCALE shortens the faults that last (1: an outage of 30 s is 30 s), FAULTS are their names
(comma separated; all by default).
"""
from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from app import config, db
from tests import clients, servers
from tests.clients import Clients
from tests.faults import FAULTS, Fault, Town, restart_the_database
from tests.processes import ROOT, Site
from tests.receiver import receiver
from tests.servers import wait_until

LEASE_SECONDS = 3.0
CLIENTS = 4
SETTLE_SECONDS = 180.0  # beyond every lease, backoff and retry of this storm's settings
SETTINGS = {
    "LEASE_SECONDS": LEASE_SECONDS, "RESCUE_INTERVAL_SECONDS": 1, "WORKER_STOP_SECONDS": 1, "WORKER_CONCURRENCY": 2,
    "CALLBACK_SCHEDULE_SECONDS": "0,1,1,1,1,2,2,2,2,2,5,5,5,5,5", "CALLBACK_TIMEOUT_SECONDS": 5,
    "CALLBACK_PER_HOST": 16, "JOB_MODULES": "tests.slow_kinds",
}


@dataclass
class Recovery:
    """How long after a fault a job that was submitted then, and all that had been accepted before, were final."""

    fault: str
    probe_seconds: float
    all_seconds: float


def storm(town: Town, told: Clients, those: list[Fault], rounds: int) -> list[Recovery]:
    """Each of those faults `rounds` times in the order of the seed; one comes when the town has recovered from the one
    before, or, one time in four, sooner."""
    order = sum((town.random.sample(those, len(those)) for _ in range(rounds)), [])
    recoveries: list[Recovery] = []
    for number, fault in enumerate(order, 1):
        town.random = random.Random(f"{town.random.random()} {number}")  # however much the last one drew
        hurry = number < len(order) and town.random.random() < 0.25
        recoveries += _strike(town, told, fault, hurry)
        print(f"  {number}/{len(order)} {_name(fault)}: " + (
            f"{recoveries[-1].probe_seconds:.1f} s, all {recoveries[-1].all_seconds:.1f} s"
            if recoveries and recoveries[-1].fault == _name(fault) else "not waited for"), flush=True)
    return recoveries


def _name(fault: Fault) -> str:
    """As the tables and FAULTS call it."""
    return fault.__name__.replace("_", " ")


def _strike(town: Town, told: Clients, fault: Fault, hurry: bool) -> list[Recovery]:
    town.wait(town.random.uniform(0.2, 1.5))
    fault(town)
    over = time.monotonic()
    if hurry:
        return []
    before = told.accepted()
    probe = told.submit_one()
    wait_until(lambda: _final([probe]), SETTLE_SECONDS, f"the probe after {_name(fault)} is final")
    probe_seconds = time.monotonic() - over
    wait_until(lambda: _final(before), SETTLE_SECONDS, f"all from before {_name(fault)} is final")
    return [Recovery(_name(fault), probe_seconds, time.monotonic() - over)]


def _final(job_ids: list[str]) -> bool:
    with contextlib.suppress(Exception), db.reading() as view:
        left = {row.id for row in view.execute(text("SELECT id FROM jobs WHERE status IN ('queued', 'running')"))}
        return not left & set(job_ids)
    return False  # the database is what has been struck


def unfinished() -> str:
    """What has not ended, for whoever must find out why."""
    with db.reading() as view:
        return "\n".join(str(tuple(row)) for question in (
            "SELECT id, status, attempt, worker, lease_until, published_at, created_at FROM jobs "
            "WHERE status IN ('queued', 'running') ORDER BY created_at LIMIT 20",
            "SELECT target_id, state, available_at, published_at, failures, last_error FROM outbox "
            "ORDER BY created_at LIMIT 20",
        ) for row in view.execute(text(question)))


def settle() -> None:
    """Waits until every job and every delivery has ended."""
    def settled() -> bool:
        with db.reading() as view:
            return not any(view.execute(text(f"SELECT count(*) FROM {question}")).scalar() for question in (
                "jobs WHERE status IN ('queued', 'running')", "deliveries WHERE state IN ('pending', 'sending')",
                "outbox WHERE state <> 'parked'"))

    wait_until(settled, SETTLE_SECONDS, "all has ended")


# --- what came of it ---


def count(told: Clients, hooks: dict[str, Counter[str]], trace: Path) -> tuple[dict[str, object], list[str]]:
    """The row of the table, and everything that is wrong."""
    acknowledged = told.acknowledged
    with db.reading() as view:
        jobs = {row.id: row for row in view.execute(text(
            "SELECT id, status, error_code, attempt, callback_url, note_id, created_at, finished_at FROM jobs"))}
        events = Counter(view.execute(text("SELECT job_id FROM history_events")).scalars())
        deliveries = Counter(view.execute(text("SELECT job_id FROM deliveries")).scalars())
        delivered = set(view.execute(text("SELECT job_id FROM deliveries WHERE state = 'delivered'")).scalars())
        keys = view.execute(text("SELECT count(DISTINCT job_id) FROM idempotency_keys")).scalar_one()
    runs = Counter(trace.read_text().splitlines()) if trace.exists() else Counter()
    called = {job_id for job_id, job in jobs.items() if job.callback_url}
    notes = {job_id for job_id, job in jobs.items() if job.note_id}
    lost = [job_id for job_id in acknowledged if job_id not in jobs or jobs[job_id].status not in (
        "succeeded", "failed")]
    twice = {
        "attempts run twice": [run for run, times in runs.items() if times > 1],
        "attempts beyond the final one": [
            run for run in runs if (one := run.split())[0] not in jobs or int(one[1]) > jobs[one[0]].attempt],
        "attempts begun before the last had ended": overlapping(),
        "notes without exactly one event": [
            job_id for job_id in notes if events[job_id] != (jobs[job_id].status == "succeeded")],
        "jobs without exactly one delivery": [job_id for job_id in called if deliveries[job_id] != 1],
        "deliveries that never arrived": sorted(called - delivered) + sorted(called - set(hooks)),
        "jobs called back under two ids": [job_id for job_id, ids in hooks.items() if len(ids) > 1],
        "submissions that made two jobs": ["-"] * abs(len(jobs) - keys),
        "jobs that failed": [job_id for job_id, job in jobs.items() if job.status == "failed" and not (
            job.error_code == "cancelled" and job_id in told.cancelled)],
        "cancelled, and went on": [job_id for job_id, said in told.cancelled.items() if said and (
            job_id not in jobs or jobs[job_id].error_code != "cancelled")],
        "said by clients": told.complaints,
    }
    stalls = [(_moment(job.finished_at) - _moment(job.created_at)) for job in jobs.values() if job.finished_at]
    row: dict[str, object] = {
        "submitted": told.submitted, "acknowledged": len(acknowledged), "finished": len(jobs) - len(
            [job for job in jobs.values() if job.finished_at is None]), "cancelled": sum(
            job.error_code == "cancelled" for job in jobs.values()), "lost": len(lost),
        "attempts": sum(job.attempt for job in jobs.values()),
        "run twice": len(twice["attempts run twice"]) + len(twice["attempts begun before the last had ended"]),
        "history events / notes": f"{sum(events.values())} / {len(notes)}",
        "callbacks / due": f"{len(set(hooks))} / {len(called)}",
        "POSTs": sum(sum(ids.values()) for ids in hooks.values()),
        "doubled effects": sum(map(len, twice.values())), "longest stall": f"{max(stalls, default=0):.1f} s",
        "slowest 202": f"{told.slowest:.1f} s",
    }
    wrong = [f"lost: {job_id}" for job_id in lost] + [
        f"{what}: {one}" for what, those in twice.items() for one in those[:10]]
    return row, wrong


def overlapping() -> list[str]:
    """Jobs of which an attempt began while another was running. Each change that a client sees counts in `version`: a
    start and an end for each attempt, the end of a job that was cancelled while it waited, and each recorded try of a
    callback. A start without an end before it is one too few."""
    with db.reading() as view:
        return [row.id for row in view.execute(text(
            "SELECT id, error_code, version - 2 * attempt - (SELECT count(*) FROM delivery_attempts "
            "JOIN deliveries ON deliveries.id = delivery_id WHERE job_id = jobs.id) AS more "
            "FROM jobs WHERE status IN ('succeeded', 'failed')"))
            if row.more not in ((0, 1) if row.error_code == "cancelled" else (0,))]


def _moment(value: object) -> float:
    from datetime import datetime, timezone

    moment = datetime.fromisoformat(str(value))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _table(rows: list[dict[str, object]]) -> str:
    if not rows:
        return "no recovery was waited for"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def recovery_table(recoveries: list[Recovery]) -> str:
    by_fault: dict[str, list[Recovery]] = defaultdict(list)
    for recovery in recoveries:
        by_fault[recovery.fault].append(recovery)
    return _table([{
        "fault": fault, "times": len(those),
        "next job, median s": f"{statistics.median(one.probe_seconds for one in those):.1f}",
        "worst s": f"{max(one.probe_seconds for one in those):.1f}",
        "all before it, worst s": f"{max(one.all_seconds for one in those):.1f}",
    } for fault, those in sorted(by_fault.items())])


# --- one storm on one database ---


def run(database: str, seed: int, those: list[Fault], rounds: int, scale: float) -> bool:
    """One storm; prints its tables and returns whether nothing was lost or doubled."""
    if database == "sqlite":  # there is no server to restart
        those = [fault for fault in those if fault is not restart_the_database]
    print(f"{database}, seed {seed}: {rounds} x {len(those)} faults, scale {scale:g}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        told = stack.enter_context(receiver())
        hooks = clients.count_hooks(told)
        postgres = stack.enter_context(servers.postgres()) if database == "postgresql" else None
        more = {} if postgres is None else {"DATABASE_URL": postgres.url(postgres.new_database())}
        trace = folder / "trace.log"
        site = stack.enter_context(Site(
            folder, **SETTINGS, **more, TRACE_LOG=trace, CALLBACK_ALLOW=f"127.0.0.1:{told.port}"))
        _adopt(site)
        town = Town(site, folder, random.Random(seed), LEASE_SECONDS, scale, postgres)
        town.start()
        began = time.monotonic()
        try:
            site.wait_ready()
            with Clients(site.api, told.url, seed, CLIENTS) as talking:
                recoveries = storm(town, talking, those, rounds)
            settle()
            row, wrong = count(talking, hooks, trace)
            checked = subprocess.run([sys.executable, "-m", "app.doctor"], cwd=ROOT, env=site.env, capture_output=True)
            if checked.returncode:
                wrong.append(f"the doctor: {checked.stdout.decode()}{checked.stderr.decode()}")
        except AssertionError:
            print(unfinished(), flush=True)
            raise
        finally:
            town.stop()
            db.dispose()
        print(_table([{"database": database, "seed": seed, "seconds": int(time.monotonic() - began), **row}]))
        print(recovery_table(recoveries))
        print("\n".join(wrong) or "nothing lost, nothing doubled; the doctor agrees", flush=True)
        return not wrong


def _adopt(site: Site) -> None:
    """This process looks into the database of the site."""
    os.environ.update({name: site.env[name] for name in ("DATABASE_URL", "VAR_DIR", "ENV_FILE")})
    config.settings.cache_clear()
    db.dispose()


def chosen(given: str) -> list[Fault]:
    """The faults of these names. Raises ValueError with all the names when one is none of them."""
    known = {_name(fault): fault for fault in FAULTS}
    names = [name.strip().replace("_", " ") for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"FAULTS: there is no {unknown[0]!r}, but\n  " + "\n  ".join(known))
    return [known[name] for name in names] or list(FAULTS)


def main() -> int:
    """0 when every storm left everything whole, 2 when it cannot be told which to make."""
    given = os.environ.get
    try:
        seed = int(given("SEED") or random.randrange(10**6))
        rounds, scale, those = int(given("ROUNDS") or 1), float(given("SCALE") or 1), chosen(given("FAULTS") or "")
        databases = (given("DATABASE") or "both").replace("both", "sqlite,postgresql").split(",")
        if set(databases) - {"sqlite", "postgresql"}:
            raise ValueError("DATABASE: sqlite, postgresql or both")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all([run(database, seed, those, rounds, scale) for database in databases]) else 1


if __name__ == "__main__":
    sys.exit(main())
