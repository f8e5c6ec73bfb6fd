"""Prebuilt statements say what SQLAlchemy would say of them."""
from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import bindparam, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from app import clock, db, jobs, schema, statements
from tasks import run_job
from tests.conftest import World
from tests.running import submit

_all = select(schema.jobs).where(schema.jobs.c.id == bindparam("job_id"))
_keep = insert(schema.tombstones).values({name: bindparam(name) for name in schema.tombstones.c.keys()})
_keep_all = statements.inserts(schema.tombstones, list(schema.tombstones.c))
_all_kept = select(schema.tombstones.c.job_id).order_by("job_id")


def tombstone(job_id: str, **values: Any) -> dict[str, Any]:
    now = clock.now()
    return {"job_id": job_id, "owner": "é", "kind": "k", "status": "failed", "finished_at": now,
            "expired_at": now + timedelta(hours=1), **values}


def test_rows_are_those_of_sqlalchemy(api: Any, world: World) -> None:
    """Texts, whole and other numbers, moments with their zone, and nothing at all."""
    waiting, done = submit(api, n=5), submit(api, n=5)
    run_job.run_once(done)
    for job_id in (waiting, done):
        with db.reading() as view:
            ours = statements.rows(view, _all, {"job_id": job_id})
            assert ours == [tuple(row) for row in view.execute(_all, {"job_id": job_id})] and len(ours) == 1
            assert statements.first(view, _all, {"job_id": job_id}) == ours[0]
            assert statements.first(view, _all, {"job_id": "another"}) is None


def test_what_is_written_is_what_sqlalchemy_would_write(world: World) -> None:
    values = [tombstone("a"), tombstone("b")]
    with db.transaction() as tx:
        assert statements.changed(tx, _keep, values[0]) == 1
        assert statements.changed_by_all(tx, _keep, [values[1], tombstone("c")]) == 2
    with db.reading() as view:
        kept = view.execute(select(schema.tombstones).order_by(schema.tombstones.c.job_id)).mappings().all()
    assert [dict(row) for row in kept[:2]] == values


def test_refusals_are_those_of_sqlalchemy_without_the_values(world: World) -> None:
    with pytest.raises(IntegrityError) as refused, db.transaction() as tx:
        statements.changed_by_all(tx, _keep, [tombstone("CANARY"), tombstone("CANARY")])
    assert not db.is_away(refused.value) and "CANARY" not in db.reason(refused.value)
    with pytest.raises(DBAPIError), db.transaction() as tx:
        statements.changed(tx, _keep, tombstone("a", status="undecided"))
    assert world.count("tombstones") == 0


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_a_connection_that_has_gone_is_not_used_again(world: World) -> None:
    with pytest.raises(OperationalError) as gone, db.transaction() as tx:
        own = tx.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with db.reading() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": own})
        jobs.find(tx, "any")
    assert db.is_away(gone.value)
    for _ in range(2):
        with db.transaction() as tx:
            assert jobs.find(tx, "any") is None


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_a_server_that_restarted_costs_nobody_a_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was not used for a moment is asked first."""
    with db.reading() as view:
        own = view.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with psycopg.connect(world.url.replace("+psycopg", "")) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [own])
    monkeypatch.setattr(db, "_TRUSTED_SECONDS", 0.0)
    with db.reading() as view:
        assert jobs.find(view, "any") is None
        assert view.execute(text("SELECT pg_backend_pid()")).scalar_one() != own


def test_several_together_say_what_they_say_alone(world: World) -> None:
    """In their order: what one has written, the next one reads."""
    here = select(schema.tombstones.c.job_id).where(schema.tombstones.c.owner == bindparam("by")).order_by("job_id")
    some = select(schema.tombstones.c.job_id).where(
        statements.listed(schema.tombstones.c.job_id, "id", 3)).order_by("job_id")
    with db.transaction() as tx:
        assert statements.together(
            tx, (here, {"by": "é"}), (_keep, tombstone("a")), (here, {"by": "é"}), (_keep, tombstone("b")),
            (some, statements.listing("id", ["c", "b"], 3)), (here, {"by": "é"}),
        ) == [[], [], [("a",)], [], [("b",)], [("a",), ("b",)]]
        assert statements.together(tx) == []


def test_of_several_together_one_is_refused_as_it_is_alone(world: World) -> None:
    """None of them is kept, and the connection is as good as before."""
    with pytest.raises(IntegrityError) as refused, db.transaction() as tx:
        statements.together(
            tx, (_keep, tombstone("a")), (_keep, tombstone("a", owner="secret")), (_keep, tombstone("b")))
    assert "secret" not in str(refused.value) and world.count("tombstones") == 0
    with db.transaction() as tx:
        assert statements.together(tx, (_keep, tombstone("a")), (_keep, tombstone("b"))) == [[], []]
    assert world.count("tombstones") == 2


def test_the_last_ones_together_are_committed_or_none_of_them(world: World) -> None:
    with db.transaction() as tx:
        found = statements.together(tx, (_keep, tombstone("a")), (_all_kept, {}), last=True)
    assert found == [[], [("a",)]] and world.count("tombstones") == 1
    with pytest.raises(IntegrityError), db.transaction() as tx:
        statements.together(tx, (_keep, tombstone("b")), (_keep, tombstone("a")), last=True)
    with pytest.raises(IntegrityError), db.transaction() as tx:
        tx.execute(_keep, tombstone("b"))
        statements.together(tx, (_all_kept, {}), (_keep, tombstone("a")), last=True)
    with db.transaction() as tx:  # the connection is as good as before
        assert statements.together(tx, (_all_kept, {}), (_keep, tombstone("b")), last=True) == [[("a",)], []]
    assert world.count("tombstones") == 2


def test_several_rows_are_written_as_one_by_one(world: World) -> None:
    values = [tombstone("a"), tombstone("b", kind='{"x",\\'), tombstone("c", owner="NULL")]
    with db.transaction() as tx:
        assert statements.together(tx, statements.of_all(tx, _keep_all, values), (_all_kept, {})) == [
            [], [("a",), ("b",), ("c",)]]
    with db.reading() as view:
        kept = view.execute(select(schema.tombstones).order_by(schema.tombstones.c.job_id)).mappings().all()
    assert [dict(row) for row in kept] == values
