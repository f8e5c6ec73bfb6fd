"""Logs: one JSON object a line on standard error, the same from every process, with nothing in it that a client or a
kind's function has said: an exception's message may hold an input, its type and its places do not."""
from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

_QUIET = ("celery.app.trace", "celery.worker.strategy", "celery.beat", "kombu", "amqp")  # our own lines say it with ids
_SILENT = ("urllib3", "requests")  # their warnings hold URLs; what they could not do, an exception says too
_OURS = "uketsuke"

log = logging.getLogger("uketsuke.process")
_about: ContextVar[dict[str, Any]] = ContextVar("about")
_process_is_about: dict[str, Any] = {}  # of threads that are not about something else


# --- what a line is about ---


@contextlib.contextmanager
def about(fields: dict[str, Any], whole_process: bool = False) -> Iterator[None]:
    """Each line that this thread logs within the block has these fields; with `whole_process`, for a process that does
    one thing at a time, each line of any thread."""
    global _process_is_about
    token = _about.set({**_about.get({}), **fields})
    _process_is_about = fields if whole_process else {}
    try:
        yield
    finally:
        _about.reset(token)
        _process_is_about = {}


def concern(**fields: Any) -> None:
    """From here on this thread's lines have these fields too, until the block of `about` ends or `forget` is called."""
    _about.set({**_about.get({}), **fields})


def forget() -> None:
    """This thread's next lines are about something else."""
    _about.set({})


def _add_fields(record: logging.LogRecord) -> bool:
    for name, value in {**_process_is_about, **_about.get({})}.items():
        if name not in record.__dict__:
            setattr(record, name, value)
    return True


def about_filter() -> Any:
    """For `logging.config`: a filter that lets everything pass, with the fields of what it is about."""
    return _add_fields


# --- how it is written ---


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class Lines(logging.Formatter):
    """A record as one line. Own code: the libraries for it take twice as long, which a submission would notice."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        # Other people's further lines are traces, with messages.
        said = record.getMessage() if record.name.startswith(_OURS) else _first_line(record)
        line = {"level": record.levelname, "logger": record.name, "message": said, "process": self._process}
        for name, value in record.__dict__.items():
            if name not in _OF_EVERY_RECORD:
                line[name] = value
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        line["at"] = datetime.fromtimestamp(record.created, timezone.utc).isoformat()
        return _encode(line)

    def formatException(self, ei: Any) -> str:
        return "" if ei[1] is None else "".join([*traceback.format_tb(ei[2]), type(ei[1]).__name__])


def _first_line(record: logging.LogRecord) -> str:
    return (record.getMessage().splitlines() or [""])[0]


def where(error: BaseException) -> dict[str, Any]:
    """For `extra`: an exception's type and the places it came through. Not its message, which may hold an input."""
    return {"error": type(error).__name__, "stack": "".join(traceback.format_tb(error.__traceback__))}


def configuration(process: str) -> dict[str, Any]:
    """A `logging.config.dictConfig` mapping for a process of this name."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"about": {"()": "app.logs.about_filter"}},
        "formatters": {"json": {
            "()": "app.logs.Lines",
            "process": process,
        }},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "filters": ["about"]}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {
            **{name: {"level": "WARNING"} for name in _QUIET},
            # The pool's, which passes nothing on: what nobody handles would be printed as it is.
            "multiprocessing": {"level": "WARNING", "handlers": ["stderr"], "propagate": False},
            **{name: {"level": "CRITICAL"} for name in _SILENT},
        },
    }


def configure(process: str) -> None:
    """Sends this process's logs, its warnings and its uncaught exceptions to standard error as JSON lines."""
    logging.config.dictConfig(configuration(process))
    # What no line says need not be found out for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as its documentation says: then it does not look for who calls
    logging.raiseExceptions = False  # a record that cannot be formatted would be printed as it is
    warnings.formatwarning = _without_message  # of whoever captures warnings: Celery does so too
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    sys.unraisablehook = lambda found: _say_uncaught(found.exc_value)
    threading.excepthook = lambda found: _say_uncaught(found.exc_value)


def say(message: str, *_: Any) -> None:
    """Logs a line from within the handler of a signal, where what it interrupted may hold whatever a logger needs."""
    handler = logging.getLogger().handlers[0]
    record = logging.makeLogRecord({"name": _OURS, "levelno": logging.INFO, "levelname": "INFO", "msg": message})
    os.write(2, f"{handler.format(record)}\n".encode())


def _without_message(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None,
) -> str:
    return f"{filename}:{lineno}: {category.__name__}"


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, KeyboardInterrupt):
        _say_uncaught(error)


def _say_uncaught(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SystemExit):
        log.error("an uncaught exception", extra=where(error))
