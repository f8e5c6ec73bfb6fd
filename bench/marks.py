"""Marks when functions of ours begin and end, in every process that has this module in JOB_MODULES: a line each in
MARKS_FILE, with the moment (`time.time`). For `python -m bench.breakdown`."""
from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from pathlib import Path
from time import time
from typing import Any

_WEB = {
    "app.api.application": ("_begin_request", "_finish_response"), "app.api.polling": ("answer",),
    "app.submissions": ("submit_job",), "app.status": ("read",), "app.waking": ("hand_over",),
}
_TASKS = {
    "tasks.publishing": ("publish_all",), "tasks.run_job": ("claim", "run", "finish"),
    "app.jobs": ("start_by_message", "succeed"), "app.status": ("write_in_passing", "write_all"),
    "tasks.deliver_webhook": ("run", "_look", "_claim", "_act"), "tasks.going_on": ("record",),
}


def wrap(owner: Any, name: str, write: Any) -> None:
    """Has this function of a module or an object say when it begins and ends."""
    function, label = getattr(owner, name), name.strip("_")

    @functools.wraps(function)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        write(f"{time():.6f} {label} begins\n".encode())
        try:
            return function(*arguments, **more)
        finally:
            write(f"{time():.6f} {label} ends\n".encode())

    setattr(owner, name, wrapped)


def _wrap_all() -> None:
    file = os.open(os.environ["MARKS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    write = functools.partial(os.write, file)
    in_celery = Path(sys.argv[0]).parent.name == "tasks"
    for module, names in (_TASKS if in_celery else _WEB).items():
        for name in names:
            wrap(import_module(module), name, write)
    if not in_celery:
        group = import_module("app.submissions")._group
        for name in ("_write", "_shown"):
            wrap(group, name, write)


if "MARKS_FILE" in os.environ:
    _wrap_all()
