"""Writers that come at the same time share a transaction, and nothing else."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from app import db, submissions
from app.group_commit import GroupCommit
from tests.conftest import World
from tests.running import kind
from tests.servers import wait_until


class Crash(BaseException):
    """What no handler expects."""


class Writers:
    """Numbers that become notes; the first transaction waits until `gathered` are behind it."""

    def __init__(self, world: World) -> None:
        self.world, self.batches, self.shown = world, list[list[int]](), list[list[int]]()
        self.group: GroupCommit[int] = GroupCommit(self._write, lambda items: self.shown.append(list(items)))
        self.first_is_in, self.go_on = threading.Event(), threading.Event()
        self.before_write: Callable[[Sequence[int]], None] = lambda items: None

    def _write(self, tx: Connection, items: Sequence[int]) -> None:
        self.batches.append(list(items))
        if not self.first_is_in.is_set():
            self.first_is_in.set()
            assert self.go_on.wait(30)
        self.before_write(items)
        for item in items:
            tx.execute(text("INSERT INTO notes (id, owner, text, created_at) VALUES (:id, 'a', 'b', :at)"),
                       {"id": item, "at": "2026-11-29 00:00:00"})

    def commit(self, *items: int) -> list[Future[None]]:
        """The first alone; the others have gathered before it commits."""
        pool = ThreadPoolExecutor(len(items))
        futures = [pool.submit(self.group.commit, items[0])]
        assert self.first_is_in.wait(30)
        futures += [pool.submit(self.group.commit, item) for item in items[1:]]
        wait_until(lambda: len(self.group._gathering._waiting) == len(items) - 1, what="the others have gathered")
        self.go_on.set()
        pool.shutdown()
        return futures

    def kept(self) -> set[int]:
        return {row[0] for row in self.world.sql("SELECT id FROM notes")}


@pytest.fixture
def writers(world: World) -> Writers:
    return Writers(world)


def test_whoever_gathers_while_one_commits_is_committed_together(writers: Writers) -> None:
    futures = writers.commit(1, 2, 3, 4)
    assert [future.exception() for future in futures] == [None] * 4
    assert writers.kept() == {1, 2, 3, 4}
    assert [sorted(batch) for batch in writers.batches] == [[1], [2, 3, 4]]
    assert sorted(map(sorted, writers.shown)) == [[1], [2, 3, 4]]


def test_what_one_breaks_the_others_do_not_suffer(writers: Writers) -> None:
    futures = writers.commit(1, 2, 1, 3)
    assert [type(future.exception()) for future in futures] == [type(None), type(None), IntegrityError, type(None)]
    assert writers.kept() == {1, 2, 3}
    assert sorted(sum(writers.shown, [])) == [1, 2, 3]


def test_a_database_that_is_away_is_so_for_all_at_once(writers: Writers) -> None:
    def away(items: Sequence[int]) -> None:
        if 2 in items:
            raise OperationalError("INSERT", None, ConnectionError("gone"))

    writers.before_write = away
    futures = writers.commit(1, 2, 3, 4)
    assert [type(future.exception()) for future in futures] == [type(None), *[OperationalError] * 3]
    assert len(writers.batches) == 2 and writers.shown == [[1]]
    writers.group.commit(5)
    assert writers.kept() == {1, 5}


class Contended(Exception):
    """As the driver says that a lock was waited for in vain."""

    sqlstate = "55P03"


def test_a_lock_that_one_waits_for_in_vain_is_not_the_others_fault(writers: Writers) -> None:
    def contended(items: Sequence[int]) -> None:
        if 3 in items:
            raise OperationalError("INSERT", None, Contended())

    writers.before_write = contended
    futures = writers.commit(1, 2, 3, 4)
    assert [type(future.exception()) for future in futures] == [type(None), type(None), OperationalError, type(None)]
    assert writers.kept() == {1, 2, 4}


def test_a_database_that_goes_while_each_is_tried_alone_is_waited_for_once(writers: Writers) -> None:
    def broken(items: Sequence[int]) -> None:
        if len(items) > 1:
            raise ValueError
        if items != [1]:
            raise OperationalError("INSERT", None, ConnectionError("gone"))

    writers.before_write = broken
    futures = writers.commit(1, 2, 3, 4)
    assert [type(future.exception()) for future in futures] == [type(None), *[OperationalError] * 3]
    assert [len(batch) for batch in writers.batches] == [1, 3, 1]


@pytest.mark.parametrize("error", [OperationalError("BEGIN", None, TimeoutError("held by another")), Crash()])
def test_whoever_waits_is_told_when_no_transaction_begins(
    writers: Writers, monkeypatch: pytest.MonkeyPatch, error: BaseException,
) -> None:
    def cannot_begin() -> Any:
        raise error

    writers.before_write = lambda items: monkeypatch.setattr(db, "transaction", cannot_begin)
    futures = writers.commit(1, 2, 3)
    assert [future.exception() for future in futures] == [None, error, error]
    monkeypatch.undo()
    writers.before_write = lambda items: None
    writers.group.commit(4)
    assert writers.kept() == {1, 4}


def test_nobody_waits_for_a_writer_that_was_torn_away(writers: Writers) -> None:
    def crash(items: Sequence[int]) -> None:
        if 2 in items:
            raise Crash

    writers.before_write = crash
    futures = writers.commit(1, 2, 3)
    assert [type(future.exception()) for future in futures] == [type(None), Crash, Crash]
    writers.group.commit(4)
    assert writers.kept() == {1, 4}


def test_what_cannot_be_shown_is_committed_all_the_same(writers: Writers) -> None:
    def broken(items: Sequence[int]) -> None:
        raise RuntimeError("of whoever shows")

    writers.group._shown = broken
    futures = writers.commit(1, 2, 3)
    told = [type(future.exception()) for future in futures]
    assert told[0] is RuntimeError and sorted(map(str, told[1:])) == sorted(map(str, [RuntimeError, type(None)]))
    assert writers.kept() == {1, 2, 3}


def test_submissions_of_one_process_share_a_transaction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs and notes, with keys and without; each has its own answer, its own message, and its own id."""
    from app import clock

    held, go_on, sizes = threading.Event(), threading.Event(), list[int]()
    write = submissions._group._write

    def slow(tx: Connection, batch: Sequence[Any]) -> None:
        sizes.append(len(batch))
        if not held.is_set():
            held.set()
            assert go_on.wait(30)
        write(tx, batch)

    monkeypatch.setattr(submissions._group, "_write", slow)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(submissions.submit_job, "a", kind("primes"), {"n": 5}, None, None, clock.now())
        assert held.wait(30)
        rest = [pool.submit(submissions.submit_job, "a", kind("primes"), {"n": n}, None, key(n % 2 and n), clock.now())
                for n in range(4)]
        rest += [pool.submit(submissions.submit_note, "a", f"note {n}", kind("history"), None, key(n % 2 and n + 10),
                             clock.now()) for n in range(4)]
        wait_until(lambda: len(submissions._group._gathering._waiting) == 8, what="the others have gathered")
        go_on.set()
    receipts = [future.result() for future in (first, *rest)]
    assert sizes == [1, 8]
    assert len({receipt.job_id for receipt in receipts}) == 9 == world.count("jobs") == world.count("outbox")
    assert world.count("idempotency_keys") == 4
    for receipt in receipts[5:]:
        (note,) = world.sql("SELECT note_id, input FROM jobs WHERE id = :id", id=receipt.job_id)
        assert note == (receipt.note_id, f'{{"note_id": {receipt.note_id}}}')
        (text_,) = world.sql("SELECT text FROM notes WHERE id = :id", id=receipt.note_id)
        assert f'"text": "{text_[0]}"' in receipt.body and world.redis.exists(f"job:{receipt.job_id}")


def key(number: int) -> submissions.Key | None:
    return submissions.Key(f"key {number}", "fingerprint") if number else None
