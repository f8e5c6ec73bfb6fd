"""The doctor: `python -m app.doctor` (`make doctor`) asks whether everything holds that must always hold, prints what
does not in a table with ids, and exits 1; `--fix` repairs what is safe to repair."""
from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from redis.exceptions import RedisError
from sqlalchemy import Connection, bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, invariants, status
from app.errors import UketsukeError
from app.schema import jobs

_SHOWN = 20  # rows of one sort in the table
_BATCH = 500
FORGET = "--fix forgets it: SQL answers"

# What a living installation is about to mend is looked at once more after so long.
SECOND_LOOK_SECONDS = status.UNFINISHED_TTL_SECONDS + 1.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which promise, of whom, what was found, and what helps."""

    promise: str
    id: str
    found: str
    help: str
    mend: Callable[[], None] | None = None


def examine(wait: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Everything that is wrong. Waits once for SECOND_LOOK_SECONDS when the view differs from SQL, which it may for as
    long. Raises `sqlalchemy.exc.SQLAlchemyError` when the database is away."""
    return [*_intact(), *_broken(), *_view(wait)]


def _intact() -> Iterator[Finding]:
    with db.reading() as view:
        if view.dialect.name == "sqlite":
            for (line,) in view.exec_driver_sql("PRAGMA quick_check"):
                if line != "ok":
                    yield Finding("the database file is intact", "-", line, "restore it from a copy")


def _broken() -> Iterator[Finding]:
    now = clock.now()
    for invariant in invariants.INVARIANTS:
        with db.reading() as view:
            rows = view.execute(invariant.broken(now).limit(invariants.MOST)).all()
        for found_id, detail in rows:
            mending = _mending(invariant, found_id)
            yield Finding(invariant.name, str(found_id), str(detail), invariant.otherwise, mending)


def _mending(invariant: invariants.Invariant, found_id: str) -> Callable[[], None] | None:
    if (mend := invariant.mend) is None:
        return None

    def run() -> None:
        with db.transaction() as tx:
            mend(tx, found_id, clock.now())

    return run


# --- the view ---


def _view(wait: Callable[[float], None]) -> list[Finding]:
    try:
        first = _differing()
        if not first:
            return []
        wait(SECOND_LOOK_SECONDS)
        known = {(finding.promise, finding.id) for finding in first}
        return [finding for finding in _differing() if (finding.promise, finding.id) in known]
    except (RedisError, OSError) as error:
        return [Finding("Redis can be looked at", "-", type(error).__name__, "polls are answered from SQL meanwhile")]


def _differing() -> list[Finding]:
    keys = status.client().scan_iter(f"{status.key('')}*", count=_BATCH)
    batches = iter(lambda: list(itertools.islice(keys, _BATCH)), [])
    return [finding for batch in batches for finding in _compare([key.removeprefix(status.key("")) for key in batch])]


_versions = select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


def _compare(ids: list[str]) -> Iterator[Finding]:
    with status.client().pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hget(status.key(job_id), "version")
            pipe.ttl(status.key(job_id))
        answers = pipe.execute(raise_on_error=False)
    with db.reading() as view:  # after Redis: SQL can only be further on
        versions: dict[str, int] = {row.id: row.version for row in view.execute(_versions, {"ids": ids})}
    for job_id, shown, ttl in zip(ids, answers[::2], answers[1::2]):
        found = _flaw(shown, ttl, versions.get(job_id))
        if found is not None:
            forget = functools.partial(status.forget, [job_id])
            yield Finding("Redis agrees with SQL", job_id, found, FORGET, forget)


def _flaw(shown: object, ttl: int, version: int | None) -> str | None:
    if ttl == -2:
        return None  # gone meanwhile
    if ttl == -1:
        return "the hash never expires"
    if version is None:
        return "there is no such job"
    return None if str(version) == shown else f"the hash shows version {shown}, SQL has {version}"


# --- the command ---


def mend(findings: list[Finding]) -> list[Finding]:
    """Repairs what is safe to repair; returns what is left for a person."""
    for finding in findings:
        if finding.mend is not None:
            finding.mend()
    status.wake_relay()
    return [finding for finding in findings if finding.mend is None]


def table(findings: list[Finding]) -> str:
    """A table of them, at most `_SHOWN` of one sort."""
    rows: list[tuple[str, str, str, str]] = [("what must hold", "id", "found", "what helps")]
    for promise, group in itertools.groupby(findings, key=lambda finding: finding.promise):
        same = list(group)
        rows += [(promise, finding.id, finding.found, finding.help) for finding in same[:_SHOWN]]
        if len(same) > _SHOWN:
            rows.append((promise, "...", f"{len(same)} in all", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip()
                     for row in rows)


def _count(view: Connection) -> int:
    return view.execute(select(func.count()).select_from(jobs)).scalar_one()


def main() -> int:
    """0: everything holds (or was repaired). 1: something is wrong. 2: nothing could be looked at."""
    parser = argparse.ArgumentParser(prog="python -m app.doctor", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="repair what is safe to repair")
    fix = parser.parse_args().fix
    try:
        db.check_tables()
        findings = examine()
        left = mend(findings) if fix else findings
        with db.reading() as view:
            count = _count(view)
    except (UketsukeError, SQLAlchemyError, OSError) as error:
        print(f"doctor: {db.reason(error) if isinstance(error, SQLAlchemyError) else error}", file=sys.stderr)
        return 2
    if findings:
        print(table(findings))
    if fix and findings:
        print(f"\n{len(findings) - len(left)} repaired, {len(left)} left")
    print(f"{count} jobs, {len(left)} things wrong" if left else f"{count} jobs: everything holds")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
