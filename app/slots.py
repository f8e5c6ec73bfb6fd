"""Numbered places in a folder: each is held by one process at a time, and falls free when that process ends, however it
ends. So files that are named after them are as many as there have been processes at one time, not as there have ever
been."""
from __future__ import annotations

import fcntl
import os
from pathlib import Path

MOST = 4096


def claim(folder: Path) -> tuple[int, int]:
    """Takes the lowest free place for this process; returns its number and the open lock that holds it, which no other
    program inherits. A fork does: the child closes it. Raises OSError when the folder cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(MOST):
        lock = os.open(folder / f"{number}.lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, lock
        except BlockingIOError:
            os.close(lock)
        except OSError:
            os.close(lock)
            raise
    raise OSError(f"{folder} has no free place for another process")
