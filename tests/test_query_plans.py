"""Every statement on the ways that must stay fast, as the database plans it: no walk through a large table, no sort.

The statements are not listed: the real functions run, and what they say to the database is noted and explained.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from psycopg import sql

from app import clock, db, jobs, outlook, redis_client, schema
from tasks import deliver_webhook, prune_expired, rescue_stalled, run_in_turn, run_job, run_together
from tasks.egress import Answer
from tests import crowd, statements
from tests.conftest import World
from tests.running import a_kind, die_in_mid_job, later, relay, submit

LARGE = set(schema.metadata.tables) - {"endpoints"}  # which are as many as there are receivers

_EXPLAINED = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
FEW = 100  # rows that PostgreSQL may sort, when it knows how many there are
_SETTLED = 7  # the server plans five executions for their values, and then compares

# What may walk through all that an index holds, by words of the step or of the statement, and why.
WALKS = {
    "ix_jobs_lease_until": "jobs that run, as many as there are slots",
    "ix_deliveries_sending_host": "callbacks under way, as many as there are threads",
    "ix_outbox_parked": "rows that wait for a person",
    "SELECT count(*) AS count_1 FROM (SELECT jobs.id": "the backlog's count, up to MAX_BACKLOG, seldom",
    "count(*) AS count_1, max(anon_1.created_at)": "a queue's length, as far as it makes a difference",
    "GROUP BY jobs.kind, jobs.status": "/metrics counts what is unfinished, at most once a second",
    "SELECT (SELECT count(*)": "/metrics counts what is unfinished, at most once a second",
    "INSERT INTO notes": "never done: SQLite would look for this note's jobs if a foreign key were broken",
}
SORTS = {
    "GROUP BY jobs.kind, jobs.status": "/metrics, at most once a second",
    "AS anon_1 FROM deliveries WHERE deliveries.endpoint": "callbacks of an endpoint that are due at one moment",
    "FROM history_events": "what happened to one note",
    "deliveries.created_at": "the rounds of one job, or of a page's",
    "WITH of_targets AS": "the rows of one message, 50 at most",
    "ORDER BY outbox.available_at LIMIT": "PostgreSQL may sort the first 2,000 for the outlook",
}


@pytest.fixture
def said(world: World, api: FlaskClient) -> dict[str, Any]:
    """What is said to a database that has been in use for long while everything is done once."""
    if world.dialect == "postgresql":
        for table in schema.metadata.tables:
            world.sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")  # nobody else decides when it is known
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    crowd.fill(20_000, 10_000, 20_000, told=1)
    with statements.made_here() as made:
        everything(world, api)
    return {statement: values for statement, values in made if statement.split(None, 1)[0] in _EXPLAINED}


def everything(world: World, api: FlaskClient) -> None:
    """All that clients ask for, and all that the tasks do."""
    url = "http://127.0.0.1:9/hook"
    for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
        api.post("/jobs", json={"n": 5, "callback_url": url}, headers=headers)
    noted = api.post("/notes", json={"text": "a note"}).json
    told = [submit(api, n=5, callback_url=url) for _ in range(3)]
    cancelled, running = submit(api, n=5), submit(api, n=5)
    relay()
    with a_kind(fail, max_attempts=2) as kind:
        failing = submit(api, kind)
        for _ in range(2):
            run_job.run_once(failing)
    for job_id in (*told, noted["job_id"]):
        run_job.run_once(job_id)
    run_until_stalled(running)
    for path in ("cancel", "redeliver"):
        api.post(f"/jobs/{cancelled}/{path}")
        api.post(f"/jobs/{running}/{path}")
        api.post(f"/jobs/{told[0]}/{path}")
    call_back()
    run_in_turn.run_all([submit(api, n=5) for _ in range(3)])
    run_together.run_all([api.post("/notes", json={"text": "a note"}).json["job_id"] for _ in range(3)])
    world.redis.flushall()
    read(api, told[0], noted["id"])
    outlook.forget()
    outlook.latest()
    world.sql("UPDATE jobs SET status = 'queued', attempt = 0, lease_until = NULL WHERE id = :id", id=running)
    die_in_mid_job(running)
    for moment in (clock.now(), later(60), later(400)):
        rescue_stalled.run_once(moment, {"q:jobs2": clock.now() - timedelta(minutes=5)})
    run_job.release_all("nobody", clock.now())
    world.set(TOMBSTONE_TTL_SECONDS=42 * 3600)
    prune_expired.run_once(later(18 * 3600 + 20))  # some of each


def fail(*_: Any) -> None:
    raise LookupError


def run_until_stalled(job_id: str) -> None:
    """What an attempt says to the database while it runs."""
    held = run_job.claim(job_id, clock.now())
    assert held is not None
    with db.transaction() as tx:
        assert jobs.extend_lease(tx, held, later(30), 1, 2) is not None
        assert jobs.cancel_requested(tx, held) is False


def call_back() -> None:
    """Callbacks: one that fails, one that is delivered, and who comes too early."""
    for code, due in ((503, later(0)), (204, later(60)), (204, later(0))):
        for task, target in relay(due):
            if task == "deliver_webhook":
                deliver_webhook.run_once(target, post=lambda *_: Answer(code, None, b""), now=lambda: due)


def read(api: FlaskClient, job_id: str, note_id: int) -> None:
    some_id = "01a22a74-ee0d-7000-8000-000000000001"
    for path in (
        f"/jobs/{job_id}", f"/jobs/{some_id}", f"/jobs/{job_id}/deliveries", f"/notes/{note_id}",
        f"/notes/{note_id}/events", "/health/ready", "/metrics", "/notes?limit=20", "/notes?limit=20&cursor=5",
    ):
        api.get(path)
    for status_ in ("", "&status=queued", "&status=running", "&status=succeeded", "&status=failed"):
        for kind in ("", "&kind=primes"):
            for cursor in ("", f"&cursor={job_id}"):
                api.get(f"/jobs?limit=20{status_}{kind}{cursor}")
    redis_client._away_until = 0.0


# --- the plans ---


def sqlite_plan(view: Any, statement: str, values: Any) -> Iterator[str]:
    """What is wrong with a plan; this database has no statistics in production either."""
    for *_, step in view.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values):
        walked = re.match(r"SCAN (\w+)", step)
        if walked and walked[1] in LARGE:
            yield f"walks: {step}"
        if "TEMP B-TREE" in step:
            yield f"sorts: {step}"


def postgresql_plan(view: Any, statement: str, values: Any) -> Iterator[str]:
    """What is wrong with a plan for these values, or with the one that the server settles on after some executions,
    which may be one for all values."""
    order = list(values)
    for number, name in enumerate(order, 1):
        statement = statement.replace(f"%({name})s", f"${number}")
    cursor = view.connection.cursor()
    cursor.execute(f"PREPARE asked AS {statement}")
    given = ", ".join(sql.Literal(values[name]).as_string(cursor) for name in order)
    found = []
    for _ in range(_SETTLED):
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE asked {f'({given})' if given else ''}")
        found.append(cursor.fetchone()[0][0]["Plan"])
    cursor.execute("DEALLOCATE asked")
    yield from {*flaws(found[0], False), *flaws(found[-1], False)}


def flaws(node: dict[str, Any], limited: bool) -> Iterator[str]:
    name, table = node["Node Type"], node.get("Relation Name") or node.get("Alias", "")
    bounded = any(word in node for word in ("Index Cond", "Recheck Cond", "TID Cond"))
    if "Scan" in name and table in LARGE and not bounded and not limited:
        yield f"walks: {name} {node.get('Index Name', '')} on {table}"
    if name.endswith("Sort") and node["Plan Rows"] > FEW:
        yield f"sorts: {name} {node.get('Sort Key')}"
    limited = name == "Limit" or limited and name in ("LockRows", "Subquery Scan", "Result")
    for below in node.get("Plans", []):
        yield from flaws(below, limited)


# Until its first ANALYZE (which autovacuum makes within a minute or two) PostgreSQL takes a third of a table for due,
# whatever the moment, and a job's callbacks for one in 200 of all. That may slow down what nobody is in a hurry for.
UNKNOWN = {
    "ORDER BY jobs.expires_at": "pruning", "DELETE FROM idempotency_keys": "pruning",
    "DELETE FROM tombstones": "pruning", "DELETE FROM deliver": "pruning",
    "DELETE FROM outbox WHERE outbox.task": "pruning",
    "FROM deliveries WHERE deliveries.job_id IN": "a list's page",
    "FROM delivery_attempts JOIN": "a job's attempts",
}


def excused(flaw: str, statement: str, known: bool) -> bool:
    flat = " ".join(statement.split())
    if flaw.startswith("sorts"):
        return not known or any(words in flat for words in SORTS)
    if re.match(r"UPDATE|SELECT .* FROM (jobs|deliveries) WHERE \1\.id = ", flat):
        return False  # which find their row by its key
    return any(words in flat or words in flaw for words in (*WALKS, *(() if known else UNKNOWN)))


def slow(made: dict[str, Any], known: bool = True) -> list[str]:
    """A line for each statement that the database would be slow with. `known`: whether it knows its tables."""
    plan = sqlite_plan if db.engine().dialect.name == "sqlite" else postgresql_plan
    found = set()
    with db.reading() as view:
        for statement, values in made.items():
            for flaw in plan(view, statement, values[0] if isinstance(values, list) else values):
                if not excused(flaw, statement, known):
                    found.add(f"{flaw}{'' if known else ' (no statistics)'}\n    {' '.join(statement.split())}")
    return sorted(found)


def test_no_statement_walks_through_a_large_table_or_sorts(world: World, said: dict[str, Any]) -> None:
    assert len(said) > 60
    found = []
    if world.dialect == "postgresql":
        found = slow(said, known=False)
        world.sql("ANALYZE")
    found += slow(said)
    assert not found, "\n".join(found)
