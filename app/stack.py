"""`make run`: every line of the Procfile on this machine, with honcho. `python -m app.stack [LINE ...]` starts just
those lines; `python -m app.stack --migrate` only makes the tables."""
from __future__ import annotations

import contextlib
import functools
import http.client
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dotenv import load_dotenv
from honcho.environ import parse_procfile
from sqlalchemy.exc import DBAPIError

from app import config, db, embedded, kinds, ports, schema, signing
from app.config import Settings
from app.errors import UketsukeError, WrongSetting
from app.supervisor import CANNOT_START, Supervisor

_STOP_MARGIN_SECONDS = 5  # for a line to end, beyond what it may take to finish or release its work
_ROOT = Path(__file__).resolve().parent.parent


def migrate() -> None:
    """Brings the tables of DATABASE_URL to this version. When they are, that takes no more than a look."""
    try:
        if db.version() != schema.REVISION:
            _upgrade()
        elif db.engine().dialect.name == "sqlite":
            db.use_wal()  # a restored copy may have lost it
    except DBAPIError as error:
        raise WrongSetting(f"DATABASE_URL: {db.reason(error)}") from None
    finally:
        db.dispose()  # whoever forks now carries no connection with it


def _upgrade() -> None:
    from alembic import command
    from alembic.config import Config

    alembic = Config()
    alembic.set_main_option("script_location", str(_ROOT / "app" / "migrations"))
    command.upgrade(alembic, "head")


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
    api, hook = ports.url(settings.host, settings.port), ports.url("127.0.0.1", settings.hooksink_port)
    shown = {
        "web": f"  API       {api}        health: {api}/health/ready",
        "flower": f"  Flower    {ports.url('127.0.0.1', settings.flower_port)}",
        "hooksink": f"  hooksink  {hook}        its log: {settings.hook_log or settings.var_dir / 'hook.log'}",
        "redis": f"  Redis     {config.redis_url()}",
    }
    where = "\n".join(text for line, text in shown.items() if line in lines)
    text = f"\nuketsuke\n{where}\n"
    if "web" in lines:
        body = '{"n": 100000, "callback_url": "' + hook + '/"}' if "hooksink" in lines else '{"n": 100000}'
        text += f"\nTry:\n  curl -i {api}/jobs -H 'Content-Type: application/json' -d '{body}'\n"
    return text + "\nCtrl-C stops everything.\n"


def _chosen(names: Sequence[str], given_redis: bool) -> dict[str, str]:
    procfile = parse_procfile((_ROOT / "Procfile").read_text()).processes
    if unknown := sorted(set(names) - set(procfile)):
        raise WrongSetting(f"the Procfile has no line {unknown[0]!r}: {' '.join(procfile)}")
    return {name: line for name, line in procfile.items()
            if (not names or name in names) and not (name == "redis" and given_redis)}


def _answers(host: str, port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=1)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def run(names: Sequence[str]) -> int:
    """Starts the lines, waits for them, and returns 0 after a stop that was asked for."""
    os.chdir(_ROOT)
    load_dotenv(config.env_file())
    os.environ.setdefault("CALLBACK_ALLOW", f"127.0.0.1:{os.environ.get('HOOKSINK_PORT') or 8141}")
    os.environ.setdefault("WORKER_STOP_SECONDS", "5")  # a person waits, and nothing is lost
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONUNBUFFERED"] = "1"
    settings = config.settings()
    lines = _chosen(names, settings.redis_url is not None)
    if not lines:
        print("nothing to start: REDIS_URL is given")
        return 0
    kinds.registry()
    check_ports(settings, list(lines))
    if "redis" in lines:
        os.close(embedded.claim_data())  # just asked: the line itself keeps it
        embedded.settle_port()
    migrate()
    signing.callback_secrets()
    supervisor = Supervisor(_STOP_MARGIN_SECONDS + max(settings.worker_stop_seconds, settings.callback_timeout_seconds))
    for name, line in lines.items():
        supervisor.add_process(name, line)
    if "web" in lines:
        supervisor.let_go_first(("redis", "web"), functools.partial(_answers, settings.host, settings.port))
    print(banner(settings, list(lines)), flush=True)
    supervisor.loop()
    return supervisor.returncode or 0


def main() -> int:
    """Runs or migrates; says in one line why it cannot."""
    try:
        if sys.argv[1:] == ["--migrate"]:
            os.chdir(_ROOT)
            migrate()
            return 0
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    except (UketsukeError, OSError) as error:
        print(f"uketsuke: {error}", file=sys.stderr)
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
