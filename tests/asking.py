"""What clients may still ask of a job, over HTTP, and what must be so once all of it is over."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app import clock, doctor, presence
from tasks import deliver_webhook
from tests.conftest import World
from tests.running import a_kind, relay


def cancel(api: FlaskClient, job_id: str, **more: Any) -> TestResponse:
    return api.post(f"/jobs/{job_id}/cancel", **more)


def redeliver(api: FlaskClient, job_id: str, **more: Any) -> TestResponse:
    return api.post(f"/jobs/{job_id}/redeliver", **more)


def another(api: FlaskClient) -> FlaskClient:
    """A client of the same application, for a thread of its own."""
    return api.application.test_client()


@contextmanager
def a_checked_kind(function: Callable[..., Any], **limits: Any) -> Iterator[str]:
    """As `a_kind`, and what the function asserts holds: its job's end alone would not tell."""
    failed: list[AssertionError] = []

    def checked(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except AssertionError as error:
            failed.append(error)
            raise

    with a_kind(checked, **limits) as name:
        yield name
    for error in failed:
        raise error


def problem(answer: TestResponse) -> tuple[int, str]:
    """The status, and the problem's name."""
    assert answer.content_type == "application/problem+json"
    return answer.status_code, answer.json["type"].removeprefix("/problems/")


def deliver_all(now: datetime | None = None) -> list[str]:
    """The relay and a courier, until nothing is due at this moment; returns whatever else was published."""
    others, moment = [], now or clock.now()
    while due := relay(moment):
        others += [target for task, target in due if task != "deliver_webhook"]
        for task, target in due * 2:  # each message twice
            if task == "deliver_webhook":
                deliver_webhook.run_once(target, now=lambda: moment)
    return others


def all_at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Each call in a thread of its own, from one moment on; returns what they returned, in order, or raises what one
    of them raised."""
    calls = list(calls)
    barrier, answers, errors = threading.Barrier(len(calls)), dict[int, Any](), list[BaseException]()

    def run(number: int, call: Callable[[], Any]) -> None:
        barrier.wait(20)
        try:
            answers[number] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return [answers[number] for number in range(len(calls))]


def nothing_is_wrong(world: World) -> bool:
    """Whether the doctor finds nothing."""
    presence.give_sign_of_life("worker", "w@h", ["q:jobs2"], 2)
    return doctor.examine(wait=lambda seconds: None) == []
