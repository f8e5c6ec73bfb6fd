"""The outbox: what is to be published. Rows are staged by whoever makes a message necessary, in the same transaction;
the relay alone publishes them; whoever claims the message settles the row."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, func, select, union_all, update

from app import statements, states
from app.schema import guard, outbox

_HANDED_OVER = "handed over"  # the lease of all rows that wake tokens name: each token goes to one relay
MAX_FAILURES = 5  # refusals that are the row's own fault, then it is parked


@dataclass(frozen=True)
class Row:
    """A row of `outbox`."""

    id: int
    task: str
    target_id: str
    queue: str
    time_limit_seconds: float | None
    state: str
    available_at: datetime
    lease: str | None
    leased_until: datetime | None
    published_at: datetime | None
    failures: int
    last_error: str | None
    together: str | None


_columns = [outbox.c[field.name] for field in fields(Row)]


Target = tuple[str, str, float | None, str | None]  # id, queue, time limit, and what it may go together with


def handed_over(task: str, target: Target, available_at: datetime, leased_until: datetime) -> Row:
    """A row as it is when it has been staged for whoever takes its token, but for its id, which only SQL knows."""
    target_id, queue, seconds, together = target
    return Row(
        0, task, target_id, queue, seconds, states.LEASED, available_at, _HANDED_OVER, leased_until, None, 0, None,
        together)


_new = [
    outbox.c[name] for name in (
        "task", "target_id", "queue", "time_limit_seconds", "state", "available_at", "lease", "leased_until",
        "created_at", "together")]


def _anew(made: Any) -> Any:
    return made.on_conflict_do_update(
        index_elements=["task", "target_id"],
        set_={**{name: made.excluded[name] for name in ("state", "available_at", "lease", "leased_until", "together")},
              "published_at": None, "failures": 0, "last_error": None})


_stage = {database: _anew(made) for database, made in statements.inserts(outbox, _new).items()}


def stage(
    tx: Connection, task: str, target_id: str, queue: str, now: datetime,
    available_at: datetime | None = None, time_limit_seconds: float | None = None, together: str | None = None,
) -> None:
    """Asks for one message: `task` with `target_id` on `queue`, not before `available_at`; or a part of one, with
    others of the same queue, limit and `together`.

    The caller holds the transaction that makes it necessary. Staging what is staged already makes it due anew.
    """
    statements.together(tx, staging(tx, task, [(target_id, queue, time_limit_seconds, together)], now, available_at))


def staging(
    tx: Connection, task: str, targets: Sequence[Target], now: datetime, available_at: datetime | None = None,
    leased_until: datetime | None = None,
) -> statements.Asked:
    """What stages several targets, one at least, as `stage` does; leased until then to whoever takes their token."""
    of_all = {
        "task": task, "available_at": available_at or now, "created_at": now,
        "state": states.LEASED if leased_until else states.WAITING,
        "lease": _HANDED_OVER if leased_until else None, "leased_until": leased_until}
    return statements.of_all(tx, _stage, [
        {**of_all, "target_id": target_id, "queue": queue, "time_limit_seconds": seconds, "together": together}
        for target_id, queue, seconds, together in targets])


# Each state by its own index, in order: a backlog is never sorted. CTEs are evaluated once; as a plain subquery
# PostgreSQL may run it again and take more than `most`.
_waiting = (
    select(outbox.c.id).where(outbox.c.state == states.WAITING, outbox.c.available_at <= bindparam("now"))
    .order_by(outbox.c.available_at, outbox.c.id).limit(bindparam("most")).with_for_update(skip_locked=True)
    .cte("waiting"))
_over = (
    select(outbox.c.id).where(outbox.c.state == states.LEASED, outbox.c.leased_until <= bindparam("now"))
    .order_by(outbox.c.leased_until).limit(bindparam("most")).with_for_update(skip_locked=True).cte("over"))
_due = union_all(select(_over.c.id), select(_waiting.c.id)).limit(bindparam("most")).cte("due")
_lease = update(outbox).values(
    state=states.LEASED, lease=bindparam("by"), leased_until=bindparam("until")).returning(*_columns)
_claim = {
    "sqlite": _lease.where(outbox.c.id.in_(select(_due.c.id))),
    # As an array: of a subquery's length PostgreSQL knows nothing, and may walk through the table to join it.
    "postgresql": _lease.where(outbox.c.id == func.any(func.array(select(_due.c.id).scalar_subquery()))),
}


def claim(tx: Connection, lease: str, now: datetime, leased_until: datetime, most: int) -> list[Row]:
    """waiting, or leased and over → leased: at most `most` due rows, under a lease of this name: first those of relays
    that died, then the longest due. Two claims never hold the same row at one time."""
    rows = statements.rows(tx, _claim[tx.dialect.name], {"by": lease, "now": now, "until": leased_until, "most": most})
    return sorted((Row(*row) for row in rows), key=lambda row: (row.available_at, row.id))


_held = (guard(outbox.c.state, states.LEASED), outbox.c.lease == bindparam("by"))
_free = {"lease": None, "leased_until": None}
# In the order of their ids, as everybody who holds several: two never wait for each other.
_these = select(outbox.c.id).where(
    outbox.c.id.in_(bindparam("ids", expanding=True)), *_held).order_by(outbox.c.id).with_for_update().cte("these")
_taken = and_(
    outbox.c.task.in_(states.OUTBOX_TASKS), outbox.c.target_id.in_(bindparam("of_targets", expanding=True)),
    guard(outbox.c.state, states.LEASED), outbox.c.lease.in_(bindparam("leases", expanding=True)))
_mark = update(outbox).values(state=states.PUBLISHED, published_at=bindparam("now"), **_free)
_mark_taken = {
    "sqlite": _mark.where(_taken),
    # Whoever holds a row claims its message: a mark waits for nobody who does, and needs none of those.
    "postgresql": _mark.where(outbox.c.id.in_(select(
        select(outbox.c.id).where(_taken).with_for_update(skip_locked=True).cte("taken").c.id))),
}
_release = update(outbox).where(outbox.c.id.in_(select(_these.c.id))).values(
    state=states.WAITING, available_at=bindparam("due"), **_free)
_refuse = update(outbox).where(outbox.c.id == bindparam("row_id"), *_held).values(
    state=bindparam("becomes"), available_at=bindparam("due"), failures=outbox.c.failures + 1,
    last_error=bindparam("why"), together=None, **_free)


def mark_published(tx: Connection, rows: Sequence[Row], now: datetime) -> int:
    """leased → published, of those of these rows whose lease still holds, and that nobody claims at this moment;
    returns how many."""
    if not rows:
        return 0
    return tx.execute(_mark_taken[tx.dialect.name], {
        "of_targets": [row.target_id for row in rows], "leases": list({row.lease for row in rows}), "now": now,
    }).rowcount


def release(tx: Connection, lease: str, ids: Sequence[int], available_at: datetime) -> int:
    """leased → waiting: the broker took none of these; not the rows' fault."""
    return tx.execute(_release, {"ids": list(ids), "by": lease, "due": available_at}).rowcount if ids else 0


def refuse(tx: Connection, lease: str, row: Row, why: str, available_at: datetime) -> str:
    """leased → waiting, or → parked after MAX_FAILURES: this row cannot be published; it is tried alone from now on.
    Returns the new state."""
    becomes = states.PARKED if row.failures + 1 >= MAX_FAILURES else states.WAITING
    tx.execute(_refuse, {"row_id": row.id, "by": lease, "becomes": becomes, "due": available_at, "why": why})
    return becomes


_settle = delete(outbox).where(
    outbox.c.task == bindparam("of_task"), outbox.c.target_id == bindparam("of_target")
).returning(outbox.c.published_at, outbox.c.available_at)


def settle(tx: Connection, task: str, target_id: str) -> datetime | None:
    """Whoever claimed the message says so: the row is gone. Returns when it had been published; a relay that had no
    time to say so yet published it after it became available."""
    row = statements.first(tx, _settle, {"of_task": task, "of_target": target_id})
    return None if row is None else row[0] or row[1]


def settling(task: str, targets: Any) -> Any:
    """The statement by which whoever claims the messages of these targets, a query, says so."""
    return delete(outbox).where(outbox.c.task == task, outbox.c.target_id.in_(targets)).returning(outbox.c.id)


_of_targets = select(outbox.c.id).where(
    outbox.c.task == bindparam("of_task"), outbox.c.target_id.in_(bindparam("of_targets", expanding=True))
).order_by(outbox.c.id).with_for_update().cte("of_targets")
_settle_all = delete(outbox).where(outbox.c.id.in_(select(_of_targets.c.id))).returning(
    outbox.c.target_id, outbox.c.published_at, outbox.c.available_at)


def settle_all(tx: Connection, task: str, target_ids: Sequence[str]) -> dict[str, datetime]:
    """As `settle`, of several: when each that had a row had been published."""
    rows = tx.execute(_settle_all, {"of_task": task, "of_targets": list(target_ids)})
    return {row.target_id: row.published_at or row.available_at for row in rows}


_moments = select(outbox.c.available_at, outbox.c.published_at).where(
    outbox.c.task == bindparam("of_task"), outbox.c.target_id == bindparam("of_target"),
    outbox.c.state != states.WAITING, outbox.c.created_at <= bindparam("due"))


def late_seconds(view: Connection, task: str, target_id: str, due: datetime, now: datetime) -> float:
    """How long after it became available a message that came by now was published, if it was asked for before `due`; 0
    otherwise. A relay that had no time yet to mark it has published it now."""
    row = view.execute(_moments, {"of_task": task, "of_target": target_id, "due": due}).first()
    return 0.0 if row is None else ((row.published_at or now) - row.available_at).total_seconds()


_of_target = (outbox.c.task.in_(states.OUTBOX_TASKS), outbox.c.target_id == bindparam("of_target"))  # as its index is
_unpark = update(outbox).where(*_of_target, guard(outbox.c.state, states.PARKED)).values(
    state=states.WAITING, available_at=bindparam("due"), failures=0, last_error=None)


def unpark(tx: Connection, target_id: str, now: datetime) -> None:
    """parked → waiting: what made it impossible to publish is over."""
    tx.execute(_unpark, {"of_target": target_id, "due": now})


_overdue = (
    select(*_columns).where(outbox.c.state == states.PUBLISHED, outbox.c.queue == bindparam("in_queue"),
                            outbox.c.published_at < bindparam("before"))
    .order_by(outbox.c.published_at).limit(bindparam("most")).with_for_update(skip_locked=True))
_republish = update(outbox).where(outbox.c.id == bindparam("row_id"), guard(outbox.c.state, states.PUBLISHED)).values(
    state=states.WAITING, available_at=bindparam("due"), published_at=None, together=None)


def published_before(tx: Connection, queue: str, before: datetime, most: int) -> list[Row]:
    """Rows of a queue that were published before then and that nobody has claimed, the oldest first."""
    return [Row(*row) for row in tx.execute(_overdue, {"in_queue": queue, "before": before, "most": most})]


def republish(tx: Connection, ids: Sequence[int], now: datetime) -> None:
    """published → waiting: the messages were lost. The next ones are their own: a job that kills whoever runs it takes
    others down with it once."""
    statements.changed_by_all(tx, _republish, [{"row_id": row_id, "due": now} for row_id in ids])


_published = outbox.c.state == states.PUBLISHED
_known = select(func.min(outbox.c.queue).label("queue")).where(_published).cte("known", recursive=True)
_further = select(func.min(outbox.c.queue)).where(_published, outbox.c.queue > _known.c.queue).scalar_subquery()
_known = _known.union_all(select(_further).where(_known.c.queue.is_not(None)))
_queues = select(_known.c.queue).where(_known.c.queue.is_not(None))  # from one to the next; DISTINCT would walk through
_oldest_waiting = select(func.min(outbox.c.available_at)).where(outbox.c.state == states.WAITING)
_oldest_leased = select(func.min(outbox.c.leased_until)).where(outbox.c.state == states.LEASED)
_count_parked = select(func.count()).where(outbox.c.state == states.PARKED)


def queues_with_published(view: Connection) -> list[str]:
    """The queues that have messages which nobody has claimed."""
    return list(view.execute(_queues).scalars())


def oldest_unpublished(view: Connection) -> datetime | None:
    """When the longest due row became available that is not published: it waits since then, or its lease is over."""
    moments = [view.execute(statement).scalar_one() for statement in (_oldest_waiting, _oldest_leased)]
    return min((moment for moment in moments if moment is not None), default=None)


def count_parked(view: Connection) -> int:
    """How many rows could not be published and wait for a person."""
    return view.execute(_count_parked).scalar_one()
