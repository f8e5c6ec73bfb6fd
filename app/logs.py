"""Logs: one JSON object a line on standard error, the same from every process."""
from __future__ import annotations

import logging
import logging.config
import traceback
from typing import Any

_NOISY = ("celery.app.trace", "kombu", "amqp", "urllib3")


def configuration(process: str) -> dict[str, Any]:
    """A `logging.config.dictConfig` mapping for a process of this name."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": "%(levelname)s %(name)s %(message)s",
            "rename_fields": {"levelname": "level", "name": "logger"},
            "timestamp": "at",
            "static_fields": {"process": process},
            "json_ensure_ascii": False,
        }},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {
            # Celery would log each task's arrival and end at INFO; our own lines say it with job ids.
            **{name: {"level": "WARNING"} for name in _NOISY},
            "celery.worker.strategy": {"level": "WARNING"},
            "celery.beat": {"level": "WARNING"},
        },
    }


def configure(process: str) -> None:
    """Sends this process's logs to standard error as JSON lines."""
    logging.config.dictConfig(configuration(process))


def where(error: BaseException) -> dict[str, Any]:
    """For `extra`: an exception's type and the places it came through. Not its message, which may hold an input."""
    return {"error": type(error).__name__, "stack": "".join(traceback.format_tb(error.__traceback__))}
