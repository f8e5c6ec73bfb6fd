"""`make run`: every line of the Procfile on this machine, with honcho. `python -m app.stack [LINE ...]` starts just
those lines; `python -m app.stack --migrate` only makes the tables."""
from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import honcho.manager
from alembic import command
from alembic.config import Config
from dotenv import load_dotenv
from honcho.environ import parse_procfile
from honcho.printer import Message, Printer
from sqlalchemy.exc import DBAPIError

from app import config, db, embedded, kinds, ports
from app.config import Settings
from app.errors import UketsukeError, WrongSetting

STOP_SECONDS = 15  # for what is running to end by itself after SIGTERM
_LAST = ("redis",)  # the others say goodbye to it

_ROOT = Path(__file__).resolve().parent.parent


class Manager(honcho.manager.Manager):
    """honcho's manager, which asks each line's own process to stop (honcho signals its children too, and a job that
    runs in one would die), and the broker last: workers put back what they hold."""

    def _killall(self, force: bool = False) -> None:
        running = [name for name, process in self._processes.items() if "returncode" not in process]
        for name in [name for name in running if name not in _LAST] or running:
            with contextlib.suppress(ProcessLookupError):
                if force:
                    os.killpg(self._processes[name]["pid"], signal.SIGKILL)
                else:
                    os.kill(self._processes[name]["pid"], signal.SIGTERM)

    def loop(self) -> None:
        self.events = _StopsTheLast(self)
        super().loop()


class _StopsTheLast:
    """The manager's event queue: once only the last lines are left of a stack that stops, it stops them too."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._queue = manager.events
        self._stopped: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

    def get(self, timeout: float) -> Message:
        message = self._queue.get(timeout=timeout)
        if message.type == "stop":
            self._stopped.add(message.name)
            left = set(self._manager._processes) - self._stopped
            if left and left <= set(_LAST):
                self._manager._processes[message.name]["returncode"] = message.data["returncode"]
                self._manager._killall()
        return message


def migrate() -> None:
    """Brings the tables of DATABASE_URL to this version."""
    alembic = Config()
    alembic.set_main_option("script_location", str(_ROOT / "app" / "migrations"))
    try:
        command.upgrade(alembic, "head")
    except DBAPIError as error:
        raise WrongSetting(f"DATABASE_URL: {db.reason(error)}") from None


def check_ports(settings: Settings, lines: Sequence[str]) -> None:
    """Raises WrongSetting for the first port that is taken, with the setting that chooses another."""
    for line, host, port, setting in (
        ("web", settings.host, settings.port, "PORT"),
        ("hooksink", "127.0.0.1", settings.hooksink_port, "HOOKSINK_PORT"),
        ("flower", "127.0.0.1", settings.flower_port, "FLOWER_PORT"),
    ):
        if line in lines and not ports.is_free(host, port):
            raise WrongSetting(f"{line}: port {port} is taken: choose another with {setting}")


def banner(settings: Settings, lines: Sequence[str]) -> str:
    """Where to look, and a line to try."""
    api = f"http://{settings.host}:{settings.port}"
    hook = f"http://127.0.0.1:{settings.hooksink_port}"
    shown = {
        "web": f"  API       {api}        health: {api}/health/ready",
        "flower": f"  Flower    http://127.0.0.1:{settings.flower_port}",
        "hooksink": f"  hooksink  {hook}        its log: {settings.hook_log or settings.var_dir / 'hook.log'}",
        "redis": f"  Redis     {config.redis_url()}",
    }
    where = "\n".join(text for line, text in shown.items() if line in lines)
    body = '{"n": 100000, "callback_url": "' + hook + '/"}'
    return (
        f"\nuketsuke\n{where}\n\nTry:\n  curl -i {api}/jobs -H 'Content-Type: application/json' -d '{body}'\n"
        "\nCtrl-C stops everything.\n")


def _chosen(names: Sequence[str], given_redis: bool) -> dict[str, str]:
    procfile = parse_procfile((_ROOT / "Procfile").read_text()).processes
    if unknown := sorted(set(names) - set(procfile)):
        raise WrongSetting(f"the Procfile has no line {unknown[0]!r}: {' '.join(procfile)}")
    return {name: line for name, line in procfile.items()
            if (not names or name in names) and not (name == "redis" and given_redis)}


def run(names: Sequence[str]) -> int:
    """Starts the lines, waits for them, and returns 0 after a stop that was asked for."""
    os.chdir(_ROOT)
    load_dotenv(".env")
    os.environ.setdefault("CALLBACK_ALLOW", f"127.0.0.1:{os.environ.get('HOOKSINK_PORT') or 8141}")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONUNBUFFERED"] = "1"
    settings = config.settings()
    lines = _chosen(names, settings.redis_url is not None)
    kinds.registry()
    check_ports(settings, list(lines))
    if "redis" in lines:
        os.close(embedded.claim_data())  # just asked: the line itself keeps it
        embedded.settle_port()
    migrate()
    config.callback_secrets()
    honcho.manager.KILL_WAIT = STOP_SECONDS
    manager = Manager(Printer(sys.stdout, prefix=True))
    for name, line in lines.items():
        manager.add_process(name, line)
    print(banner(settings, list(lines)), flush=True)
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # the terminal was closed
    manager.loop()
    asked_for = {known["rc"] for known in honcho.manager.SIGNALS.values()}
    return 0 if manager.returncode in asked_for else int(manager.returncode or 1)


def main() -> int:
    """Runs or migrates; says in one line why it cannot."""
    try:
        if sys.argv[1:] == ["--migrate"]:
            os.chdir(_ROOT)
            migrate()
            return 0
        return run(sys.argv[1:])
    except (UketsukeError, OSError) as error:
        print(f"uketsuke: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
