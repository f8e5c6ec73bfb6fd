"""What a thread tells Redis without waiting, and what it asks next."""
from __future__ import annotations

import logging
import os
import signal

import pytest
from flask.testing import FlaskClient
from redis.exceptions import TimeoutError as TimeoutAway

from app import clock, redis_client, status
from tasks import run_job
from tests.conftest import World, one_database
from tests.running import submit

pytestmark = one_database


def test_each_answer_is_that_of_its_own_question(world: World) -> None:
    redis_client.tell(("SET", "a", "1"), ("INCR", "a"))
    redis_client.tell(("INCR", "a"))
    assert redis_client.ask(("GET", "a"), ("STRLEN", "a")) == ["3", 1]
    assert redis_client.ask(("GET", "a")) == ["3"]


def test_what_was_told_and_refused_breaks_no_question(world: World, caplog: pytest.LogCaptureFixture) -> None:
    redis_client.tell(("RPUSH", "a", "1"), ("INCR", "a"), ("SET", "b", "1"))
    with caplog.at_level(logging.WARNING, "uketsuke"):
        assert redis_client.ask(("GET", "b")) == ["1"]
    assert [(line.message, line.error) for line in caplog.records] == [("Redis did not do it", "ResponseError")]
    assert not redis_client.away()


@pytest.mark.parametrize("unread", [0, 1])
def test_a_line_that_was_closed_meanwhile_is_made_anew(world: World, unread: int) -> None:
    redis_client.ask(("PING",))
    for _ in range(unread):
        redis_client.tell(("SET", "a", "1"))
    world.redis.client_kill_filter(_type="normal", skipme=True)
    assert redis_client.ask(("SET", "b", "2"), ("GET", "b"))[1] == "2"
    assert not redis_client.away()


def test_a_redis_that_stands_still_holds_up_no_claim(api: FlaskClient, world: World) -> None:
    """An attempt begins when it is claimed; what its thread asks next finds out."""
    job_id = submit(api, n=5)
    pid = world.redis.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        held = run_job.claim(job_id, clock.now())
        assert held is not None and not redis_client.away()
        status.write(held)
        assert redis_client.away()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_job_is_shown_running_before_anything_else_of_it(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    held = run_job.claim(job_id, clock.now())
    assert held is not None
    redis_client.ask(("PING",))  # what was told before is done
    shown = status.read(job_id)
    assert shown is not None and shown.status == "running"


def test_what_was_told_is_told_again_on_the_new_line(world: World) -> None:
    """A line that was closed while it was kept swallows a command without a word."""
    redis_client.ask(("PING",))
    world.redis.client_kill_filter(_type="normal", skipme=True)
    redis_client.tell(("SET", "a", "1"))
    assert redis_client.ask(("GET", "a")) == ["1"]
    assert not redis_client.away()


def test_after_a_redis_that_did_not_answer_nothing_is_left_to_read(world: World) -> None:
    redis_client.tell(("SET", "a", "1"))
    pid = world.redis.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutAway):
            redis_client.ask(("GET", "a"))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert redis_client.ask(("GET", "a"), ("STRLEN", "a")) == ["1", 1]
