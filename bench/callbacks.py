"""Callbacks a second to a receiver that is fast, against a plain loop of `requests.Session().post` in as many threads.

Ours: an installation with 2,000 finished jobs whose callbacks are due, a copy of one that was made before; broker,
courier and beat start, and what counts is the time between the first hook and the last. The loop sends the same bodies
with the same headers, signed beforehand, and does nothing else: it keeps nothing, and forgets what it has not sent when
it dies.
"""
from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import requests

from app import clock, db, ids, jobs, kinds, statements, submissions
from bench import receiving, stores
from bench.figures import Target
from tasks import deliver_webhook, run_job, signature
from tests.processes import Site

CALLBACKS = 2000
THREADS = 4  # as CALLBACK_PER_HOST
REPEATS = 3
_WAIT_SECONDS = 120

OURS = {"sqlite": "callbacks, SQLite", "postgresql": "callbacks, PostgreSQL"}
LOOP = "requests.Session().post"
TARGETS = [Target("callbacks", "deliveries_per_second", ours, LOOP, at_least=0.7) for ours in OURS.values()]

Run = Callable[[], dict[str, float]]


def seed(url: str, number: int) -> None:
    """So many finished jobs, whose callbacks are due, in the installation of this process's settings."""
    kind = kinds.registry()["primes"]
    for _ in range(0, number, 100):
        with db.transaction() as tx:
            for _ in range(100):
                _seed_one(tx, kind, url)
    db.dispose()


def _seed_one(tx: Any, kind: kinds.Kind, url: str) -> None:
    now = clock.now()
    job = submissions.new_job("local", kind, {"n": 10}, url, None, now)
    statements.together(tx, jobs.submitting(tx, [job]))
    running = jobs.start(tx, job.id, "bench", now, now + timedelta(seconds=60), None)
    assert running is not None
    ended = jobs.succeed(tx, running, '{"n": 10, "count": 4}', clock.now(), timedelta(days=1))
    assert ended is not None
    run_job.follow_up(tx, ended, now, clock.now())


def seeded(door: receiving.Door, folder: Path, **settings: str) -> None:
    """Makes the database that each run begins with."""
    folder.mkdir()
    with Site(folder, CALLBACK_ALLOW=f"127.0.0.1:{door.port}", **settings) as site:
        seeding = [sys.executable, "-m", "bench.callbacks", "seed", door.url + "/hook", str(CALLBACKS)]
        subprocess.run(seeding, env=site.env, check=True, timeout=_WAIT_SECONDS)


def courier(door: receiving.Door, file: Path | None, **settings: str) -> dict[str, float]:
    """One run of ours, on a copy of an SQLite file or with these settings."""
    door.forget()
    with tempfile.TemporaryDirectory() as folder:
        if file is not None:
            shutil.copy(file, folder)
        with Site(Path(folder), CALLBACK_ALLOW=f"127.0.0.1:{door.port}", CALLBACK_PER_HOST=THREADS, **settings) as site:
            stack = site.start("redis", "courier", "beat")
            seconds = door.wait(CALLBACKS, _WAIT_SECONDS)
            used = _processor_seconds(stack.part("tasks courier"))
            stack.kill()
    return {"deliveries_per_second": CALLBACKS / seconds, "courier_ms_per_delivery": used * 1000 / CALLBACKS}


def _processor_seconds(process: psutil.Process) -> float:
    """With its start, of a second or two."""
    times = process.cpu_times()
    return float(times.user + times.system)


def loop(door: receiving.Door) -> dict[str, float]:
    """One run of the plain loop, in a process of its own."""
    door.forget()
    ran = subprocess.run([sys.executable, "-m", "bench.callbacks", "loop", door.url + "/hook"], check=True,
                         timeout=_WAIT_SECONDS, capture_output=True, text=True)
    return {"deliveries_per_second": CALLBACKS / door.wait(CALLBACKS, 1),
            "loop_ms_per_delivery": float(ran.stdout) * 1000 / CALLBACKS}


def _loop(url: str) -> None:
    sent = [_signed(url) for _ in range(CALLBACKS)]
    random.shuffle(sent)
    began = psutil.Process().cpu_times()
    threads = [threading.Thread(target=_post_all, args=(url, sent[at::THREADS])) for at in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = psutil.Process().cpu_times()
    print(ended.user + ended.system - began.user - began.system)


def _post_all(url: str, sent: list[tuple[bytes, dict[str, str]]]) -> None:
    session = requests.Session()
    for body, headers in sent:
        session.post(url, data=body, headers=headers, timeout=15).raise_for_status()


def _signed(url: str) -> tuple[bytes, dict[str, str]]:
    """As the courier would send it."""
    now = clock.now()
    job = submissions.new_job("local", kinds.registry()["primes"], {"n": 10}, url, None, now)
    ended = replace(job, status="succeeded", attempt=1, result='{"n": 10, "count": 4}',
                    started_at=now, finished_at=now, expires_at=now)
    body = deliver_webhook.body_of(ended)
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    headers = signature.headers(f"msg_{ids.new_id(now)}", now, body, [secret])
    return body, {**headers, "Content-Type": "application/json"}


def contenders(stack: contextlib.ExitStack) -> dict[str, Run]:
    """What is measured, by name; the servers run until the stack is closed."""
    door = stack.enter_context(receiving.receiver())
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    postgres = stack.enter_context(stores.postgres())
    template = postgres.new_database()
    seeded(door, folder / "sqlite")
    seeded(door, folder / "postgresql", DATABASE_URL=postgres.url(template))
    return {
        OURS["sqlite"]: lambda: courier(door, folder / "sqlite" / "jobs.sqlite3"),
        OURS["postgresql"]: lambda: courier(
            door, None, DATABASE_URL=postgres.url(postgres.new_database(template))),
        LOOP: lambda: loop(door),
    }


if __name__ == "__main__":
    if sys.argv[1] == "seed":
        seed(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "loop":
        _loop(sys.argv[2])
