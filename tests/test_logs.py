"""Logs: one JSON object a line, about something, and nothing of what a client said."""
from __future__ import annotations

import io
import itertools
import json
import logging
import logging.config
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from app import logs
from tests.conftest import World, one_database
from tests.processes import ROOT, Process, Site
from tests.servers import free_port, wait_until

MARKER = "MARKER7f3a"


def lines_of(process: Process) -> list[dict[str, Any]]:
    """Everything that a process has written."""
    return [json.loads(line) for line in process.output().splitlines()]


@pytest.fixture
def written() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What is logged in this process, through the real configuration."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.Lines("test"))
    handler.addFilter(logs.about_filter())
    root = logging.getLogger()
    root.addHandler(handler)
    logs.forget()  # what other tests of this thread were about
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)


def test_a_line_has_what_it_is_about(written: Callable[[], list[dict[str, Any]]]) -> None:
    log = logging.getLogger("uketsuke.test")
    with logs.about({"job_id": "1"}):
        log.warning("inner")
        logs.concern(request_id="2")
        log.warning("both", extra={"job_id": "its own"})
        thread = threading.Thread(target=log.warning, args=("another thread",))
        thread.start()
        thread.join()
    log.warning("outer")
    inner, both, thread_line, outer = written()
    assert inner["job_id"] == "1" and "request_id" not in inner
    assert both["job_id"] == "its own" and both["request_id"] == "2"
    assert not {"job_id", "request_id"} & (set(thread_line) | set(outer))


def test_in_a_process_of_one_job_every_thread_is_about_it(written: Callable[[], list[dict[str, Any]]]) -> None:
    log = logging.getLogger("uketsuke.test")
    with logs.about({"job_id": "1"}, whole_process=True):
        thread = threading.Thread(target=log.warning, args=("another thread",))
        thread.start()
        thread.join()
    log.warning("after it")
    assert [line.get("job_id") for line in written()] == ["1", None]


def test_an_exception_is_written_without_its_message(written: Callable[[], list[dict[str, Any]]]) -> None:
    try:
        try:
            raise ValueError(MARKER)
        except ValueError as error:
            raise LookupError(MARKER) from error
    except LookupError as error:
        logging.getLogger("uketsuke.test").exception("ours")
        logging.getLogger("theirs").error("theirs\nTraceback: %s", error, exc_info=True)
    assert [line["message"] for line in written()] == ["ours", "theirs"]
    assert all("LookupError" in line["exc_info"] and "test_logs.py" in line["exc_info"] for line in written())
    assert MARKER not in str(written())


@pytest.mark.parametrize("program", [
    "raise LookupError('{}')",
    "import warnings; warnings.warn('{}')",
    "import threading; t = threading.Thread(target=lambda: int('{}')); t.start(); t.join()",
    "class Odd:\n    def __del__(self): raise ValueError('{}')\nOdd()",
    "import logging; logging.getLogger('x').warning('%d', '{}')",
    "import urllib3.connectionpool as c; c.log.warning('Failed to parse headers (url=%s)', 'http://h/?{}')",
])
def test_what_is_uncaught_is_a_line_without_a_message(program: str) -> None:
    program = "from app import logs; logs.configure('test')\n" + program.format(MARKER)
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert MARKER not in ran.stdout + ran.stderr
    for line in ran.stderr.splitlines():
        assert {"at", "level", "process"} <= set(json.loads(line))


@one_database
def test_what_no_handler_handles_is_logged_without_its_path(
    api: FlaskClient, world: World, written: Callable[[], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        monkeypatch.undo()
        raise LookupError(MARKER)

    api.application.config["PROPAGATE_EXCEPTIONS"] = False
    monkeypatch.setattr("app.metrics.refused", broken)
    unchecked = FlaskClient(api.application, api.application.response_class)
    assert unchecked.get(f"/{MARKER}?{MARKER}").status_code == 500
    [line] = [line for line in written() if line["message"] == "an uncaught exception"]
    assert line["error"] == "LookupError"
    assert MARKER not in str(written())


def broken_receiver(stop: threading.Event) -> int:
    """Answers callbacks with headers that cannot be read, then with no status; returns its port."""
    unreadable = f"HTTP/1.1 503 {MARKER}\r\nno header {MARKER}\r\nContent-Length: 0\r\n\r\n"
    answers = itertools.chain([unreadable], itertools.repeat(f"{MARKER} {MARKER}\r\n\r\n"))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.1)

    def serve() -> None:
        with listening:
            while not stop.is_set():
                try:
                    taken, _ = listening.accept()
                except TimeoutError:
                    continue
                with taken:
                    taken.settimeout(5)
                    taken.recv(65536)
                    taken.sendall(next(answers).encode())

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1]


@pytest.mark.acceptance
@pytest.mark.parametrize("site", ["postgresql"], indirect=True)
def test_every_line_of_every_process_is_json_and_tells_no_secret(site: Site) -> None:
    stop = threading.Event()
    closed, broken = free_port(), broken_receiver(stop)
    site.env |= {
        "JOB_MODULES": "tests.slow_kinds,tests.telling_kinds", "API_TOKENS": f"alice:{MARKER}token",
        "CALLBACK_SCHEDULE_SECONDS": "0,1", "CALLBACK_ALLOW": f"127.0.0.1:{closed},127.0.0.1:{broken}"}
    site.session.headers["Authorization"] = f"Bearer {MARKER}token"
    processes = {line: site.start_alone(line) for line in ("web", "worker", "courier", "beat")}
    site.wait_ready()

    def submit(path: str, body: dict[str, Any], key: str) -> requests.Response:
        answer = site.post(path, body, Idempotency_Key=f"{MARKER}-{key}")
        assert answer.status_code == 202, answer.text
        return answer

    def callback(port: int) -> str:
        return f"http://127.0.0.1:{port}/{MARKER}?token={MARKER}"

    first = submit("/jobs", {"kind": "echo", "text": MARKER, "callback_url": callback(closed)}, "1")
    again = submit("/jobs", {"kind": "echo", "text": MARKER, "callback_url": callback(closed)}, "1")
    failing = submit("/jobs", {"kind": "blurt", "text": MARKER, "callback_url": callback(broken)}, "2")
    note = submit("/notes", {"text": MARKER}, "3")
    ids = {answer.json()["job_id"] for answer in (first, failing, note)}
    for job_id in ids:
        site.poll(job_id)
    assert site.get(f"/jobs/{first.json()['job_id']}").json()["result"] == {"text": MARKER}
    assert MARKER in site.get(f"/jobs/{failing.json()['job_id']}").json()["error"]["message"]
    refused = refuse_all(site)
    site.session.close()  # after a body that was refused unread, the server may end the connection at any moment
    for job_id in ids - {note.json()["job_id"]}:
        wait_until(lambda: site.get(f"/jobs/{job_id}").json()["callback"]["status"] == "exhausted", 30, "exhausted")
    for process in processes.values():
        process.stop()
    stop.set()

    told = {name: lines_of(process) for name, process in processes.items()}
    for name, lines in told.items():
        assert MARKER not in processes[name].output()
        for line in lines:
            assert {"at", "level", "logger", "message"} <= set(line) and line["process"] == name
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", line["at"])

    accepted = [line for line in told["web"] if line["message"] == "accepted"]
    assert [(line["job_id"], line.get("kind"), line["replayed"], line["request_id"]) for line in accepted] == [
        (answer.json()["job_id"], kind, replayed, answer.headers["X-Request-Id"]) for answer, kind, replayed in (
            (first, "echo", False), (again, None, True), (failing, "blurt", False), (note, "history", False))]
    assert [(line["problem"], line["status"], line["rule"], line["request_id"]) for line in told["web"]
            if line["message"] == "refused"] == refused
    about_requests = [line for line in told["web"] if "request_id" in line]
    assert len(about_requests) == len(accepted) + len(refused)  # no line for a poll that succeeds

    def about(process: str, message: str) -> set[str]:
        return {line["job_id"] for line in told[process] if line["message"] == message}

    assert about("worker", "attempt ended") == ids
    assert about("worker", "a word of a kind") == {first.json()["job_id"]}
    assert any("UserWarning" in line["message"] and line["job_id"] == first.json()["job_id"]
               for line in told["worker"] if line["logger"] == "py.warnings" and "job_id" in line)
    for message in ("it failed", "it does not fit", "an uncaught exception"):
        assert about("worker", message) == {failing.json()["job_id"]}
    assert about("courier", "delivery attempted") == ids - {note.json()["job_id"]}


def refuse_all(site: Site) -> list[tuple[str, int, str, str]]:
    """Requests that are refused, and what the log shall say of each."""
    answers = [
        ("/jobs", site.post("/jobs", {"kind": "echo", "text": [MARKER]})),
        ("/jobs", site.post("/jobs", {"kind": MARKER})),
        ("/jobs", site.post("/jobs", {"n": 5, "callback_url": f"http://10.0.0.1/?{MARKER}"})),
        ("/jobs", site.post("/jobs", {"kind": "echo", "text": "other"}, Idempotency_Key=f"{MARKER}-1")),
        ("/jobs", site.session.post(f"{site.api}/jobs", data=MARKER, headers={"Content-Type": "application/json"})),
        ("/jobs/<job_id>", site.get(f"/jobs/{MARKER}?{MARKER}")),
        ("none", site.get(f"/{MARKER}?token={MARKER}")),
        ("/jobs", site.post("/jobs", {"n": 5}, Authorization=f"Bearer {MARKER}wrong")),
    ]
    for _, answer in answers:
        assert answer.status_code in (400, 401, 404, 422), answer.text
    return [(answer.json()["type"].removeprefix("/problems/"), answer.status_code, rule, answer.headers["X-Request-Id"])
            for rule, answer in answers]
