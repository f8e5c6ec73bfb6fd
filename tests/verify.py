"""`make verify`: the whole story for a person. Starts and stops the processes itself, injects failures, and records
every request, answer and row count in docs/verification.md. It stops at the first thing that is not as promised."""
from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
import requests
from pysqlite3 import dbapi2

from tests.processes import ROOT, Process, Site
from tests.servers import wait_until

OUTCOME = ROOT / "docs" / "verification.md"
TABLES = ("notes", "jobs", "outbox", "history_events", "deliveries", "delivery_attempts", "idempotency_keys")
SHOWN_HEADERS = ("Location", "Link", "Retry-After", "Idempotent-Replayed", "Content-Type")


class Story:
    """What happened, as Markdown; told to the terminal too."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.lines: list[str] = []
        self.started: dict[str, int] = {}

    def write(self, *lines: str) -> None:
        self.lines.extend(lines)
        print("\n".join(lines), flush=True)

    def chapter(self, title: str) -> None:
        self.write("", f"## {title}", "")

    def holds(self, what: str, true: bool) -> None:
        """A promise, checked."""
        self.write(f"* {'✓' if true else '✗'} {what}")
        if not true:
            raise SystemExit(f"not as promised: {what}")

    def start(self, line: str) -> Process:
        self.started[line] = self.started.get(line, 0) + 1
        process = self.site.start_alone(line)
        self.write("", f"*`{line}` is started, for the {('first', 'second', 'third')[self.started[line] - 1]} time, "
                       "as a process of its own.*")
        return process

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> requests.Response:
        """One request and its answer, recorded whole."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.site.session.request(
            method, self.site.api + path, json=body, headers=named, timeout=30)
        told = [f"{method} {path}", *(f"{name}: {value}" for name, value in named.items())]
        if body is not None:
            told.append(json.dumps(body, ensure_ascii=False).replace(self.site.hook, "http://127.0.0.1:8141"))
        told += ["", f"{answer.status_code} {answer.reason}"]
        told += [f"{name}: {answer.headers[name]}" for name in SHOWN_HEADERS if name in answer.headers]
        told.append(answer.text.strip().replace(self.site.hook, "http://127.0.0.1:8141"))
        self.write("", "```http", *told, "```", "")
        return answer

    def sql(self, statement: str) -> list[Any]:
        """As a person would, beside the running processes."""
        connection = dbapi2.connect(self.site.folder / "jobs.sqlite3", timeout=10)
        try:
            with connection:
                return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def inject(self, statement: str) -> None:
        self.sql(statement)
        self.write("", "```sql", f"{statement};", "```", "")

    def counts(self) -> dict[str, int]:
        """How many rows each table has, recorded."""
        found = {table: self.sql(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}
        self.write("", f"| {' | '.join(found)} |", f"|{' --- |' * len(found)}",
                   f"| {' | '.join(map(str, found.values()))} |", "")
        return found

    def attempts(self, job_id: str) -> int:
        return self.sql(f"SELECT attempt FROM jobs WHERE id = '{job_id}'")[0][0]

    def messages(self) -> int:
        """How many messages wait on q:jobs2."""
        with redis.Redis.from_url(f"redis://127.0.0.1:{self.redis_port()}/0") as client:
            return int(client.llen("q:jobs2"))  # type: ignore[arg-type]

    def redis_port(self) -> int:
        return int((self.site.folder / "redis.port").read_text())

    def until(self, true: Callable[[], Any], what: str) -> None:
        wait_until(true, 60, what)
        self.holds(what, True)


def a_job_is_received(story: Story) -> str:
    story.chapter("A job is received while no worker runs")
    body = {"n": 1_000_000, "callback_url": f"{story.site.hook}/"}
    first = story.request("POST", "/jobs", body, Idempotency_Key="order-1")
    job_id = first.json()["job_id"]
    story.holds("the API has succeeded: 202 with a Location", first.headers["Location"] == f"/jobs/{job_id}")
    again = story.request("POST", "/jobs", body, Idempotency_Key="order-1")
    story.holds("the repeated key gets the same answer, byte for byte", again.content == first.content)
    story.until(lambda: story.messages() == 1, "the relay has published it: one message on q:jobs2")
    counts = story.counts()
    story.holds("one job, one outbox row, one key", [counts[name] for name in TABLES[1:3] + TABLES[-1:]] == [1, 1, 1])
    story.request("GET", f"/jobs/{job_id}")
    return job_id


def the_api_is_killed(story: Story, web: Process, job_id: str) -> Process:
    story.chapter("The API is killed and started again before the job runs")
    web.kill()
    story.write("*`kill -9` of the whole `web` tree.*")
    web = story.start("web")
    story.site.wait_answering()
    answer = story.request("GET", f"/jobs/{job_id}")
    story.holds("nothing is lost", answer.json()["status"] == "queued" and story.messages() == 1)
    return web


def the_job_is_done(story: Story, job_id: str) -> None:
    story.chapter("A worker runs it, and the callback is delivered")
    worker = story.start("worker")
    job = story.site.poll(job_id)
    story.until(lambda: any(job_id in line for line in story.site.hooks()), "the hook has arrived")
    wait_until(lambda: story.sql("SELECT state FROM deliveries") == [("delivered",)])
    story.request("GET", f"/jobs/{job_id}")
    story.holds("the result is right", job["result"] == {"n": 1_000_000, "count": 78_498})
    story.request("GET", f"/jobs/{job_id}/deliveries")
    story.write("hook.log:", "", "```", *story.site.hooks(), "```")
    story.holds("one line, its signature valid", ["signature=valid" in line for line in story.site.hooks()] == [True])
    counts = story.counts()
    story.holds("the outbox is empty", counts["outbox"] == 0)
    worker.stop()
    story.write("*The worker is stopped.*")


def a_job_row_cannot_be_written(story: Story) -> None:
    story.chapter("Before the commit: the job row cannot be written")
    before = story.counts()
    story.inject("CREATE TRIGGER no_job BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'injected failure'); END")
    answer = story.request("POST", "/notes", {"text": "never kept"})
    story.holds("500, as a problem", answer.status_code == 500 and "problem+json" in answer.headers["Content-Type"])
    story.holds("and no note: the failure undid it", story.counts() == before)
    story.inject("DROP TRIGGER no_job")


def a_history_cannot_be_written(story: Story) -> None:
    story.chapter("After the commit: the history cannot be written")
    story.inject("CREATE TRIGGER no_history BEFORE INSERT ON history_events "
                 "BEGIN SELECT RAISE(ABORT, 'injected failure'); END")
    answer = story.request("POST", "/notes", {"text": "受付 keeps this"})
    note, job_id = answer.json()["id"], answer.json()["job_id"]
    story.holds("the API has succeeded", answer.status_code == 202)
    worker = story.start("worker")
    story.until(lambda: story.attempts(job_id) >= 2, "two attempts were made")
    job = story.request("GET", f"/jobs/{job_id}")
    story.holds("the history is not done", job.json()["status"] != "succeeded")
    story.holds("the note stays", story.request("GET", f"/notes/{note}").status_code == 200)
    story.holds("without history", story.request("GET", f"/notes/{note}/events").json() == {"events": []})
    story.inject("DROP TRIGGER no_history")
    story.site.poll(job_id)
    story.request("GET", f"/jobs/{job_id}")
    events = story.request("GET", f"/notes/{note}/events").json()["events"]
    story.holds("the next attempt completed it, with exactly one event", len(events) == 1)
    worker.stop()
    story.write("*The worker is stopped.*")


def a_final_update_fails(story: Story) -> None:
    story.chapter("The final update fails after the history was written")
    story.inject("CREATE TRIGGER no_success BEFORE UPDATE ON jobs WHEN NEW.status = 'succeeded' "
                 "BEGIN SELECT RAISE(ABORT, 'injected failure'); END")
    answer = story.request("POST", "/notes", {"text": "written twice?"})
    note, job_id = answer.json()["id"], answer.json()["job_id"]
    worker = story.start("worker")
    story.until(lambda: story.attempts(job_id) >= 1, "an attempt was made")
    wait_until(lambda: story.site.get(f"/jobs/{job_id}").json()["status"] == "queued")
    events = story.request("GET", f"/notes/{note}/events").json()["events"]
    story.holds("its history was undone with it", events == [])
    story.inject("DROP TRIGGER no_success")
    story.site.poll(job_id)
    events = story.request("GET", f"/notes/{note}/events").json()["events"]
    story.holds("the next attempt completed both", len(events) == 1)
    a_job_fails(story)
    worker.stop()


def a_job_fails(story: Story) -> None:
    story.chapter("A job fails for good")
    story.inject("CREATE TRIGGER no_result BEFORE UPDATE ON jobs WHEN NEW.result IS NOT NULL "
                 "BEGIN SELECT RAISE(ABORT, 'injected failure'); END")
    job_id = story.request("POST", "/jobs", {"n": 5, "callback_url": f"{story.site.hook}/"}).json()["job_id"]
    job = story.site.poll(job_id)
    story.request("GET", f"/jobs/{job_id}")
    ended = (job["status"], job["attempt"])
    story.holds("failed after its three attempts, and a 200 all the same", ended == ("failed", 3))
    story.until(lambda: any(f"job_id={job_id} status=failed" in line for line in story.site.hooks()),
                "its receiver was told so")
    story.inject("DROP TRIGGER no_result")


def the_end(story: Story) -> None:
    story.chapter("The end")
    counts = story.counts()
    story.holds("two notes, one event each", counts["notes"] == counts["history_events"] == 2)
    statuses = story.sql("SELECT status, count(*) FROM jobs GROUP BY status ORDER BY status")
    story.holds("four jobs, all final", statuses == [("failed", 1), ("succeeded", 3)])
    story.holds("nothing waits: the outbox is empty", counts["outbox"] == 0)


def tell(story: Story) -> None:
    """The whole story, in order."""
    version = platform.python_version()
    story.write("# Verification", "",
                "Written by `make verify`: every request, answer and row count of one run, on SQLite "
                f"{dbapi2.sqlite_version} and the embedded Valkey, Python {version}, "
                f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.", "",
                "*`redis`, `courier`, `beat` and `hooksink` run all the time.*")
    rest = story.site.start("redis", "courier", "beat", "hooksink")
    wait_until(lambda: (story.site.folder / "redis.port").exists())
    web = story.start("web")
    story.site.wait_answering()
    job_id = a_job_is_received(story)
    web = the_api_is_killed(story, web, job_id)
    the_job_is_done(story, job_id)
    a_job_row_cannot_be_written(story)
    a_history_cannot_be_written(story)
    a_final_update_fails(story)
    the_end(story)
    for process in (web, rest):
        story.holds(f"`{process.name}` stops cleanly, and nothing of it is left", process.stop() == 0)


def main(outcome: Path = OUTCOME) -> int:
    """Tells the story in a folder of its own and writes it down."""
    folder = Path(tempfile.mkdtemp(prefix="uketsuke-verify-"))
    try:
        with Site(folder) as site:
            story = Story(site)
            tell(story)
        outcome.write_text(re.sub(r"\n{3,}", "\n\n", "\n".join(story.lines)) + "\n")
        print(f"\nEverything is as promised; the record is in {outcome.name}.")
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
