"""Processes that die: one act of the flow in a process of its own, killed at a seam.

A seam lies on either side of each effect: of each commit, of the publish, of the POST; one is in the middle of the run.
SIGKILL leaves no `finally`, no rollback and no goodbye: what remains is what the kernel and the servers make of it.
"""
from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Connection
from werkzeug.test import TestResponse

from app import db, kinds, statements
from app.api import create_app
from app.kinds import Kind
from tasks import deliver_webhook, egress, going_on, publishing, relay_outbox, run_job

KEY = "the client's"

Reached = Callable[[str], None]  # is told the name of each seam, in order


@dataclass(frozen=True)
class Flow:
    """What a client asks for, and the kind of job that does it."""

    path: str
    body: dict[str, Any]
    kind: Kind

    def submit(self, client: FlaskClient) -> TestResponse:
        """The client's request; sent again it is the same one."""
        return client.post(self.path, json=self.body, headers={"Idempotency-Key": KEY})


def give_up(input: Any, job: kinds.Job) -> None:
    """A kind's function that always raises. Here, where the processes find it."""
    raise LookupError("no luck")


# --- the acts ---


def _submit(flow: Flow, target: str, reached: Reached) -> None:
    assert flow.submit(create_app().test_client()).status_code == 202


def _relay(flow: Flow, target: str, reached: Reached) -> None:
    assert relay_outbox.drain(_between("publish", publishing.publish, reached)) == 1


def _run(flow: Flow, target: str, reached: Reached) -> None:
    assert run_job.run_once(target) is not None


def _deliver(flow: Flow, target: str, reached: Reached) -> None:
    assert deliver_webhook.run_once(target, post=_between("POST", egress.post, reached)) is not None


# What the house's processes do from the submission to the callback, in this order.
ACTS: dict[str, Callable[[Flow, str, Reached], None]] = {
    "submit": _submit, "publish the job": _relay, "run": _run, "publish the callback": _relay, "deliver": _deliver}


def _go_on(flow: Flow, target: str, reached: Reached) -> None:
    going_on.SECONDS, going_on.BATCH_SECONDS = 600.0, 60.0
    numbers = itertools.count(1)
    deliver_webhook.run(
        target, post=lambda *arguments: _between(f"POST {next(numbers)}", egress.post, reached)(*arguments))


def _cancel(flow: Flow, target: str, reached: Reached) -> None:
    assert create_app().test_client().post(f"/jobs/{target}/cancel").status_code == 200


def _redeliver(flow: Flow, target: str, reached: Reached) -> None:
    assert create_app().test_client().post(f"/jobs/{target}/redeliver").status_code == 202


# What a client may ask for beside; `target` is its job.
ASKED: dict[str, Callable[[Flow, str, Reached], None]] = {"cancel": _cancel, "redeliver": _redeliver}


def perform(act: str, flow: Flow, target: str = "", reached: Reached = lambda seam: None) -> None:
    """Does one act in this process. `target` is what its message names, for those that a message leads to."""
    with _seams(flow.kind, reached):
        {**ACTS, **ASKED, "go on": _go_on}[act](flow, target, reached)


# --- the seams ---


@contextmanager
def _seams(kind: Kind, reached: Reached) -> Iterator[None]:
    """The seams that are no arguments of the product's functions: of its transactions, and of the kind's function."""
    watched = dataclasses.replace(kind, function=_ending("in mid-run", kind.function, reached))
    together = statements.together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db, "transaction", _counted(db.transaction, reached))
        # A commit in the last statements' round trip has nothing before it: here it has a round trip of its own.
        patch.setattr(statements, "together", lambda tx, *asked, last=False: together(tx, *asked))
        patch.setitem(kinds._registered, kind.name, watched)
        yield


def _between(effect: str, function: Callable[..., Any], reached: Reached) -> Callable[..., Any]:
    def passing(*arguments: Any) -> Any:
        reached(f"before {effect}")
        answer = function(*arguments)
        reached(f"after {effect}")
        return answer

    return passing


def _ending(seam: str, function: Callable[..., Any], reached: Reached) -> Callable[..., Any]:
    """The seam where the function has done its work, well or not, and nobody knows of it yet."""
    def ending(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            reached(seam)

    return ending


def _counted(
    whole: Callable[[], AbstractContextManager[Connection]], reached: Reached,
) -> Callable[[], AbstractContextManager[Connection]]:
    numbers = itertools.count(1)

    @contextmanager
    def transaction() -> Iterator[Connection]:
        # Another thread's is a heartbeat, which comes when the machine is slow.
        number = next(numbers) if threading.current_thread() is threading.main_thread() else "of a heartbeat"
        with whole() as tx:
            yield tx
            reached(f"before commit {number}")
        reached(f"after commit {number}")

    return transaction


# --- the death ---

# Forked from a process that has one thread and has imported what they need: pytest's own has several threads.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, "psycopg", "celery.app.amqp"])


def die(act: str, seam: str, flow: Flow, target: str = "") -> int | None:
    """Does one act in a new process with this process's settings, which kills itself at the seam; returns how it ended,
    `-SIGKILL` when the seam was there."""
    process = _processes.Process(target=_perform_until, args=(act, seam, flow, target, dict(os.environ)))
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    process.join()
    process.close()
    return ended


def _perform_until(act: str, seam: str, flow: Flow, target: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)

    def reached(here: str) -> None:
        if here == seam:
            os.kill(os.getpid(), signal.SIGKILL)

    perform(act, flow, target, reached)
