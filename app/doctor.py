"""The doctor: `python -m app.doctor` (`make doctor`) asks whether everything holds that must always hold, prints what
does not in a table with ids, and exits 1; `--fix` repairs what is safe to repair."""
from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redis.exceptions import RedisError
from sqlalchemy import Connection, and_, bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, invariants, presence, redis_client, states, status, turns, waking
from app import outbox as message
from app.errors import UketsukeError
from app.invariants import Invariant
from app.schema import deliveries, jobs, outbox

_SHOWN = 20  # rows of one sort in the table; a screen
_BATCH = 500  # hashes a round trip: 8 ms of work, and a reply of some 200 kB
FORGET = "--fix forgets it: SQL answers"
_FOREIGN = "of another installation or database? it ends within the hour"

# What a living installation is about to mend is looked at once more after so long.
SECOND_LOOK_SECONDS = status.UNFINISHED_TTL_SECONDS + 1.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which promise, of whom, what was found, and what helps. `mend` says whether it holds
    afterwards."""

    promise: str
    id: str
    found: str
    help: str
    mend: Callable[[], bool] | None = None


def examine(wait: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Everything that is wrong. Waits once for SECOND_LOOK_SECONDS when the view differs from SQL, which it may for as
    long. Raises `sqlalchemy.exc.SQLAlchemyError` when the database is away."""
    return [*_intact(), *_broken(), *_redis(wait)]


def _intact() -> Iterator[Finding]:
    with db.reading() as view:
        if view.dialect.name == "sqlite":
            for (line,) in view.exec_driver_sql("PRAGMA quick_check"):
                if line != "ok":
                    yield Finding("the database file is intact", "-", line, "restore it from a copy")


def _broken() -> Iterator[Finding]:
    for invariant in invariants.INVARIANTS:
        with db.reading() as view:
            rows = view.execute(invariant.broken(clock.now()).limit(invariants.MOST)).all()
        for found_id, detail in rows:
            mending = None if invariant.mend is None else functools.partial(_mend, invariant, found_id)
            found = f"since {clock.isoformat(detail)}" if isinstance(detail, datetime) else str(detail)
            yield Finding(invariant.name, str(found_id), found, invariant.otherwise, mending)


def _mend(invariant: Invariant, found_id: str) -> bool:
    """Repairs what is still broken. False when somebody moves it at this moment: that is left alone."""
    assert invariant.mend is not None
    with db.transaction() as tx:
        if not _hold(tx, found_id):
            return False
        now = clock.now()
        question = invariant.broken(now)
        if tx.execute(question.where(question.selected_columns[0] == found_id)).first() is not None:
            invariant.mend(tx, found_id, now)
    return True


def _hold(tx: Connection, found_id: str) -> bool:
    """Until the transaction ends nobody else moves the row, job or delivery of this id (SQLite has one writer anyway).
    Never waits, so it is part of no deadlock; False when somebody else holds one of them."""
    row = and_(outbox.c.task.in_(states.OUTBOX_TASKS), outbox.c.target_id == found_id)
    for wanted in (select(outbox.c.id).where(row), select(jobs.c.id).where(jobs.c.id == found_id),
                   select(deliveries.c.id).where(deliveries.c.id == found_id)):
        held = tx.execute(wanted.with_for_update(skip_locked=True, key_share=True)).all()
        if len(held) < len(tx.execute(wanted).all()):
            return False
    return True


# --- the view ---


def _redis(wait: Callable[[float], None]) -> list[Finding]:
    try:
        return [*_unserved(), *_view(wait)]
    except (RedisError, OSError) as error:
        return [Finding("Redis can be looked at", "-", type(error).__name__, "start it (make run), or set REDIS_URL")]


def _unserved() -> Iterator[Finding]:
    with db.reading() as view:
        waiting = set(message.queues_with_published(view)) - {turns.QUEUE}
    for queue in presence.unserved(waiting):
        yield Finding("a queue with messages has a worker", queue, "none is alive", "start one: WORKER_QUEUES")


def _view(wait: Callable[[float], None]) -> list[Finding]:
    first = _differing()
    if not first:
        return []
    wait(SECOND_LOOK_SECONDS)
    return [finding for seen, finding in _differing().items() if seen in first]


def _differing() -> dict[tuple[str, ...], Finding]:
    """What is wrong, by what was seen: the job and what its hash shows, which moves on while the job does."""
    keys = redis_client.client().scan_iter(f"{status.key('')}*", count=_BATCH)
    ours = (found for key in keys if _ID.fullmatch(found := key.removeprefix(status.key(""))))  # others share Redis
    batches = iter(lambda: list(itertools.islice(ours, _BATCH)), [])
    return {seen: finding for batch in batches for seen, finding in _compare(batch)}


_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FIELDS = ("version", "status", "owner", "attempt")
_rows = select(*(jobs.c[name] for name in ("id", *_FIELDS))).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


def _compare(ids: list[str]) -> Iterator[tuple[tuple[str, ...], Finding]]:
    with redis_client.client().pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(status.key(job_id), *_FIELDS, "document")
            pipe.ttl(status.key(job_id))
        answers = pipe.execute(raise_on_error=False)
    with db.reading() as view:  # after Redis: SQL can only be further on
        rows = {row.id: row for row in view.execute(_rows, {"ids": ids})}
    for job_id, shown, ttl in zip(ids, answers[::2], answers[1::2]):
        found = _flaw(shown, ttl, rows.get(job_id))
        if found is not None:
            forget = functools.partial(_forget, job_id) if job_id in rows else None
            finding = Finding("Redis agrees with SQL", job_id, found, FORGET if forget else _FOREIGN, forget)
            yield (job_id, str(shown)), finding


def _flaw(shown: Any, ttl: Any, row: Any) -> str | None:
    if ttl == -2:
        return None  # gone meanwhile
    if not isinstance(shown, list):
        return "it is no hash"
    if ttl == -1:
        return "the hash never expires"
    if row is None:
        return "there is no such job"
    for name, seen, true in zip(_FIELDS, shown, row[1:]):
        if seen != str(true):
            return f"the hash shows {name} {seen}, SQL has {true}"
    return None if _is_of(shown[-1], row) else "the hash shows the document of something else"


def _is_of(document: Any, row: Any) -> bool:
    try:
        told = json.loads(document)
        return (told["job_id"], told["status"], told["attempt"]) == (row.id, row.status, row.attempt)
    except (TypeError, ValueError, KeyError):
        return False


def _forget(job_id: str) -> bool:
    try:
        redis_client.client().delete(status.key(job_id))
    except (RedisError, OSError):
        return False
    return True


# --- the command ---


def mend(findings: list[Finding]) -> list[Finding]:
    """Repairs what is safe to repair; returns what is left for a person."""
    left = [finding for finding in findings if finding.mend is None or not finding.mend()]
    waking.relay()
    return left


def _mend_all(findings: list[Finding]) -> tuple[int, list[Finding]]:
    """Repairs, and looks again for as long as that helps and a question may not have named all; returns how many were
    repaired, and what is left."""
    repaired = 0
    while True:
        left = mend(findings)
        repaired += len(findings) - len(left)
        if len(left) == len(findings) or len(findings) < invariants.MOST:
            return repaired, left
        findings = examine()


def table(findings: list[Finding], left: list[Finding]) -> str:
    """A table of them, at most `_SHOWN` of one sort; those that are not left were repaired."""
    rows: list[tuple[str, str, str, str]] = [("what must hold", "id", "found", "what helps")]
    for promise, group in itertools.groupby(findings, key=lambda finding: finding.promise):
        same = list(group)
        rows += [(promise, finding.id, finding.found, finding.help if finding in left else "repaired")
                 for finding in same[:_SHOWN]]
        if len(same) > _SHOWN:
            rows.append((promise, "...", f"{len(same)} in all{', or more' * (len(same) == invariants.MOST)}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip()
                     for row in rows)


_EPILOG = f"""Exit status: 0, everything holds, or was repaired; 1, something is wrong; 2, nothing could be looked at.
Where Redis shows something else than SQL, as it may for a moment, it looks again after {SECOND_LOOK_SECONDS:.0f} s."""


def main() -> int:
    """0: everything holds (or was repaired). 1: something is wrong. 2: nothing could be looked at."""
    parser = argparse.ArgumentParser(prog="python -m app.doctor", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--fix", action="store_true", help="repair what is safe to repair")
    fix = parser.parse_args().fix
    logging.getLogger("uketsuke").addHandler(logging.NullHandler())  # the table says it
    try:
        db.check_tables()
        findings = examine()
        repaired, left = _mend_all(findings) if fix else (0, findings)
        with db.reading() as view:
            count = view.execute(select(func.count()).select_from(jobs)).scalar_one()
    except (UketsukeError, SQLAlchemyError, OSError) as error:
        print(f"doctor: {db.reason(error) if isinstance(error, SQLAlchemyError) else error}", file=sys.stderr)
        return 2
    if findings:
        print(table(findings, left))
    if fix and findings:
        print(f"\n{repaired} repaired, {len(left)} left")
    print(f"jobs: {count}; wrong: {len(left)}" if left else f"jobs: {count}; everything holds")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
