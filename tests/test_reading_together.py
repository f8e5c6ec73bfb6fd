"""Who reads the view at the same time, in one process, shares a round trip to Redis, and nothing else."""
from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionAway

from app import redis_client, status
from app.status import View
from tasks import run_job
from tests.conftest import World, one_database
from tests.running import submit
from tests.servers import wait_until

pytestmark = one_database


class Crash(BaseException):
    """What no handler expects."""


class Readers:
    """The first one's round trip does not end until the others have gathered behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[str]] = []
        self.first_is_in, self.go_on = threading.Event(), threading.Event()
        self.answer: Callable[[AbstractConnection, list[str]], list[Any]] = status._look
        monkeypatch.setattr(status, "_look", self._look)

    def _look(self, line: AbstractConnection, job_ids: list[str]) -> list[Any]:
        self.asked.append(job_ids)
        try:
            return self.answer(line, job_ids)
        finally:
            if not self.first_is_in.is_set():
                self.first_is_in.set()
                assert self.go_on.wait(30)

    def read(
        self, *job_ids: str, meanwhile: Callable[[], Any] = lambda: None, connected: Callable[[], Any] = lambda: None,
    ) -> list[Future[View | None]]:
        """The first alone; `meanwhile` it has its answer, and has not ended yet. Each thread begins with `connected`.
        """
        with ThreadPoolExecutor(len(job_ids), initializer=connected) as pool:
            read = [pool.submit(status.read, job_ids[0])]
            assert self.first_is_in.wait(30)
            meanwhile()
            read += [pool.submit(status.read, each) for each in job_ids[1:]]
            wait_until(lambda: len(status._looks._waiting) == len(job_ids) - 1, what="the others have gathered")
            self.go_on.set()
        return read


@pytest.fixture
def readers(api: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> Readers:
    return Readers(monkeypatch)


def ids(read: list[Future[View | None]]) -> list[str | None]:
    return [None if (found := each.result()) is None else found.job_id for each in read]


def test_whoever_gathers_while_one_asks_is_answered_together(api: FlaskClient, readers: Readers) -> None:
    made = [submit(api, n=5) for _ in range(4)]
    assert ids(readers.read(*made)) == made
    assert [sorted(asked) for asked in readers.asked] == [made[:1], made[1:]]


def test_what_one_key_holds_the_others_do_not_suffer(api: FlaskClient, readers: Readers, world: World) -> None:
    made = [submit(api, n=5) for _ in range(6)]
    _, a_list, no_text, cut, gone, _ = map(status.key, made)
    world.redis.delete(a_list, gone)
    world.redis.rpush(a_list, "a", "b")
    world.redis.hset(no_text, "owner", b"\xff\xfe")
    world.redis.hset(cut, "document", "{")
    assert ids(readers.read(*made)) == [made[0], None, None, None, None, made[5]]
    assert len(readers.asked) == 2
    assert not redis_client.away()


def test_an_answer_from_before_somebody_came_is_not_theirs(api: FlaskClient, readers: Readers) -> None:
    job_id = submit(api, n=5)
    before, after = readers.read(job_id, job_id, meanwhile=lambda: run_job.run_once(job_id))
    assert before.result().status == "queued" and after.result().status == "succeeded"  # type: ignore[union-attr]


def test_a_redis_that_does_not_answer_is_waited_for_once(
    api: FlaskClient, readers: Readers, world: World,
) -> None:
    """Whoever gathers meanwhile finds it away, and so has SQL's answer as soon as the first."""
    made, there = [submit(api, n=5) for _ in range(4)], os.environ["REDIS_URL"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world.set(REDIS_URL=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        redis_client._client.cache_clear()
        try:
            assert ids(readers.read(*made)) == [None] * 4
        finally:
            world.set(REDIS_URL=there)
            redis_client._client.cache_clear()
    assert readers.asked == [made[:1]] and redis_client.away()
    redis_client._away_until, redis_client._trouble_at = 0.0, -math.inf
    assert status.read(made[3]) is not None


def test_a_connection_that_was_closed_is_made_anew_for_all(api: FlaskClient, readers: Readers, world: World) -> None:
    made = [submit(api, n=5) for _ in range(4)]

    def closed(line: AbstractConnection, job_ids: list[str]) -> list[Any]:
        if len(readers.asked) == 2:
            world.redis.client_kill_filter(_type="normal", skipme=True)
        return look(line, job_ids)

    look, readers.answer = readers.answer, closed
    assert ids(readers.read(*made, connected=lambda: redis_client.ask(("PING",)))) == made
    assert [sorted(asked) for asked in readers.asked] == [made[:1], made[1:], made[1:]]


@pytest.mark.parametrize("error", [ConnectionAway("gone"), Crash()])
def test_nobody_waits_for_a_reader_that_was_torn_away(
    api: FlaskClient, readers: Readers, error: BaseException,
) -> None:
    def torn(line: AbstractConnection, job_ids: list[str]) -> list[Any]:
        if made[1] in job_ids:
            raise error
        return look(line, job_ids)

    made, look, readers.answer = [submit(api, n=5) for _ in range(4)], readers.answer, torn
    first, *others = readers.read(*made)
    assert ids([first]) == made[:1]
    told = [each.exception() for each in others]
    assert told.count(None) == (3 if isinstance(error, ConnectionAway) else 2)
    assert all(each.result() is None for each in others if each.exception() is None)
    redis_client._away_until, redis_client._trouble_at = 0.0, -math.inf
    assert status.read(made[3]) is not None
