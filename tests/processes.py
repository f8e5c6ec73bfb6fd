"""The Procfile's processes, started as a person would, on free ports and a folder of their own."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests
from pysqlite3 import dbapi2
from sqlalchemy import NullPool, create_engine, text

from tests.servers import free_port, wait_until

ROOT = Path(__file__).parent.parent
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR")


class Process:
    """One command in a session of its own, its output in a file."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with open(log, "ab") as out:
            self.popen = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def family(self) -> list[psutil.Process]:
        """The process and all that descends from it."""
        try:
            this = psutil.Process(self.popen.pid)
            return [this, *this.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self, seconds: float = 30, sig: int = signal.SIGTERM) -> int:
        """Asks it to stop, and checks that nothing of it is left."""
        family = self.family()
        self.popen.send_signal(sig)
        code = self.popen.wait(seconds)
        left = psutil.wait_procs(family, timeout=5)[1]
        assert not left, f"{self.name} left {left}\n{self.output()}"
        return code

    def kill(self) -> None:
        """kill -9 of the process and all that descends from it, at once."""
        for process in self.family():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.popen.wait(10)

    def part(self, words: str) -> psutil.Process:
        """The oldest process of it whose command line holds these words."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return min(found, key=lambda process: process.create_time())

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Site:
    """A folder and free ports for one installation; lines of the Procfile are started in it, together or alone."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.port, self.hook_port, self.flower_port = free_port(), free_port(), free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        self.hook = f"http://127.0.0.1:{self.hook_port}"
        self.hook_log = folder / "hook.log"
        self.env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.env |= {
            "ENV_FILE": "", "PYTHONPATH": str(ROOT), "PORT": str(self.port), "HOOKSINK_PORT": str(self.hook_port),
            "FLOWER_PORT": str(self.flower_port), "VAR_DIR": str(folder), "HOOK_LOG": str(self.hook_log),
            "DATABASE_URL": f"sqlite:///{folder}/jobs.sqlite3", "WORKER_CONCURRENCY": "2",
            "CALLBACK_ALLOW": f"127.0.0.1:{self.hook_port}", "PYTHONUNBUFFERED": "1",
            **{name: str(value) for name, value in settings.items()}}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        self.running: list[Process] = []
        self.session = self.client()
        # The tables first: lines that start at once would find none.
        migrated = [sys.executable, "-m", "app.stack", "--migrate"]
        subprocess.run(migrated, cwd=ROOT, env=self.env, check=True, timeout=60)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self.session.close()
        for process in self.running:
            if process.popen.poll() is None:
                process.kill()
            if error is not None or "pytest" in sys.modules:  # which shows it when the test has failed
                print(f"--- {process.name}\n{process.output()[-6000:]}")

    def client(self) -> requests.Session:
        """A client of its own, for a thread of its own."""
        session = requests.Session()
        session.trust_env = False
        return session

    def start(self, *lines: str) -> Process:
        """`make run ONLY="..."`; without lines, all of them."""
        return self._start("stack", [sys.executable, "-m", "app.stack", *lines])

    def start_alone(self, line: str) -> Process:
        """One line of the Procfile, as any supervisor would."""
        commands = dict(entry.split(": ", 1) for entry in (ROOT / "Procfile").read_text().splitlines())
        return self._start(line, ["/bin/sh", "-c", commands[line]])

    def run(self, name: str, *command: str) -> Process:
        """Some other command, with the site's settings."""
        return self._start(name, ["/usr/bin/env", *command])

    def _start(self, name: str, argv: list[str]) -> Process:
        process = Process(name, argv, self.env, self.folder / f"{name}-{len(self.running)}.log")
        self.running.append(process)
        return process

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """What a person reads in the database's own shell."""
        url = self.env["DATABASE_URL"]
        module = {"module": dbapi2} if url.startswith("sqlite") else {}
        engine = create_engine(url, poolclass=NullPool, **module)
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def wait_ready(self, seconds: float = 60) -> None:
        """Waits until /health/ready says 200."""
        wait_until(lambda: self.answers("/health/ready", 200), seconds, "ready")

    def wait_answering(self, seconds: float = 30) -> None:
        """Waits until the API answers."""
        wait_until(lambda: self.answers("/health", 200), seconds, "answers")

    def answers(self, path: str, code: int) -> bool:
        try:
            return self.get(path).status_code == code
        except requests.ConnectionError:
            return False

    def get(self, path: str, **more: Any) -> requests.Response:
        return self.session.get(self.api + path, timeout=30, **more)

    def post(self, path: str, body: Any, **headers: str) -> requests.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.session.post(self.api + path, json=body, headers=named, timeout=30)

    def submit(self, **body: Any) -> str:
        answer = self.post("/jobs", body)
        assert answer.status_code == 202, answer.text
        return answer.json()["job_id"]

    def poll(self, job_id: str, seconds: float = 60, politely: bool = False) -> dict[str, Any]:
        """Polls until the job is final; politely: as often as Retry-After says, as a client should."""
        def final() -> dict[str, Any] | None:
            answer = self.get(f"/jobs/{job_id}")
            assert answer.status_code == 200, answer.text
            job = answer.json()
            if politely:
                threading.Event().wait(int(answer.headers.get("Retry-After", 0)))
            assert ("Retry-After" in answer.headers) is (job["status"] in ("queued", "running"))
            return job if job["status"] in ("succeeded", "failed") else None

        return wait_until(final, seconds, f"{job_id} is final")

    def hooks(self) -> list[str]:
        return self.hook_log.read_text().splitlines() if self.hook_log.exists() else []
