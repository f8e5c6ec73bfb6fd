"""The threads that beat for running attempts."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import kinds
from tasks import heart, run_job
from tests.asking import a_checked_kind, another
from tests.conftest import World, one_database
from tests.running import submit
from tests.servers import wait_until


class Patient:
    """Counts its beats, and wants the next one after so many seconds."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds, self.beats = seconds, 0

    def beat(self) -> float:
        self.beats += 1
        return self.seconds


@pytest.fixture
def one() -> Iterator[heart.Heart]:
    """A heart of its own."""
    yield heart.Heart()


def test_no_beat_comes_after_the_end_and_none_is_under_way(one: heart.Heart) -> None:
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(Patient):
        def beat(self) -> float:
            inside.set()
            assert go_on.wait(20) and not ended.is_set()
            return super().beat()

    slow = Slow()
    one.begin(slow, 0)
    assert inside.wait(20)
    end = threading.Thread(target=lambda: (one.give_back(), ended.set()))
    end.start()
    wait_until(lambda: one._attempt is None)
    assert not ended.is_set()
    go_on.set()
    end.join()
    next_one = Patient()
    one.begin(next_one, 0)
    wait_until(lambda: next_one.beats > 3)
    assert slow.beats == 1
    one.give_back()


def test_who_wants_its_first_beat_sooner_than_the_one_before_gets_it(one: heart.Heart) -> None:
    one.begin(Patient(), 3600)
    wait_until(lambda: one._wakes_at < float("inf"))  # it sleeps until then
    one.give_back()
    hasty = Patient()
    one.begin(hasty, 0.01)
    wait_until(lambda: hasty.beats > 1)
    one.give_back()


def test_a_beat_that_fails_in_an_unknown_way_is_not_the_last(one: heart.Heart, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(heart, "_AGAIN_SECONDS", 0.01)

    class Ill(Patient):
        def beat(self) -> float:
            if super().beat() and self.beats < 3:
                raise LookupError("a secret")
            return 0.01

    ill = Ill()
    one.begin(ill, 0)
    wait_until(lambda: ill.beats > 4)
    one.give_back()
    assert [line.error for line in caplog.records if line.levelname == "ERROR"] == ["LookupError"] * 2


@one_database
def test_one_thread_serves_one_job_after_another(api: FlaskClient, world: World) -> None:
    run_job.run_once(submit(api, n=5))
    before = threading.active_count()
    for _ in range(20):
        run_job.run_once(submit(api, n=5))
        assert threading.active_count() <= before  # others may end


@one_database
def test_progress_that_is_complete_is_shown_when_the_job_goes_on(api: FlaskClient, world: World) -> None:
    world.set(LEASE_SECONDS=1)

    def wrap_up(input: Any, job: kinds.Job) -> None:
        job.progress(10, 10)
        wait_until(lambda: "progress" in another(api).get(f"/jobs/{job.id}").json)

    with a_checked_kind(wrap_up) as kind:
        run_job.run_once(submit(api, kind))
