"""The Procfile's Celery lines: `python -m tasks worker | courier | beat | flower`. Each becomes a Celery command, with
the settings of the environment and `.env`."""
from __future__ import annotations

import os
import sys

from app import config, db, kinds, logs, ports, signing
from app.config import Settings
from app.errors import UketsukeError, WrongSetting

# Events for Flower; no chatter among workers, which nothing here listens to and each start would wait for.
_QUIETLY = ("--task-events", "--without-mingle", "--without-gossip")


def worker(settings: Settings) -> list[str]:
    """Runs jobs, each in a process of its own: a kind may use the processor, leak or crash."""
    return [
        "worker", "--pool", "prefork", "--concurrency", str(settings.worker_concurrency),
        "--queues", ",".join(settings.worker_queues), "--hostname", f"worker-{os.getpid()}@%h", *_QUIETLY,
    ]


def courier(settings: Settings) -> list[str]:
    """Waits on the network with many threads: publishes the outbox, delivers callbacks, rescues, prunes."""
    return [
        "worker", "--pool", "threads", "--concurrency", str(settings.courier_concurrency),
        "--queues", "relay,callbacks", "--hostname", f"courier-{os.getpid()}@%h", *_QUIETLY,
    ]


def beat(settings: Settings) -> list[str]:
    """The clock. No pid file, which would be left behind."""
    return ["beat", "--pidfile="]


def flower(settings: Settings) -> list[str]:
    """The dashboard, on loopback. The ticks of the clock come often: 10,000 tasks are some hours."""
    if not ports.is_free("127.0.0.1", settings.flower_port):
        raise WrongSetting(f"port {settings.flower_port} is taken: choose another with FLOWER_PORT")
    argv = ["flower", "--address=127.0.0.1", f"--port={settings.flower_port}", "--max_tasks=10000", "--logging=error"]
    if settings.flower_basic_auth:
        os.environ["FLOWER_BASIC_AUTH"] = settings.flower_basic_auth  # not in the arguments, which `ps` shows
    return argv


ROLES = {"worker": worker, "courier": courier, "beat": beat, "flower": flower}


def main() -> int:
    """Becomes the Celery process of this role, or says in one line why it cannot."""
    role = sys.argv[1] if len(sys.argv) == 2 else ""
    if role not in ROLES:
        print(f"usage: python -m tasks {' | '.join(ROLES)}", file=sys.stderr)
        return 2
    logs.configure(role)
    try:
        kinds.registry()
        arguments = ROLES[role](config.settings())
        if role == "courier":
            signing.callback_secrets()
        if role in ("worker", "courier"):
            db.check_tables()
    except (UketsukeError, OSError) as error:
        print(f"{role}: {error}", file=sys.stderr)
        return 2
    os.environ["UKETSUKE_ROLE"] = role
    if role == "flower":
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)  # its own metrics are not ours
    else:
        # Whole before a signal comes, at which beat may make its schedule a second time.
        from celery.app import amqp  # noqa: F401
        from tasks import broker  # noqa: F401

    from celery import __main__ as command

    # Called, not executed: a new program would import it all once more. Celery may start itself anew with these words.
    sys.argv = [command.__file__, "--app", "tasks.celery", "--quiet", *arguments]
    command.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
