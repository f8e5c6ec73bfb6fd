"""Deadlines of what runs in threads, which cannot be interrupted: one thread sees to all of them, and is there only as
long as something runs. A thread for each, as `threading.Timer` is one, costs as much as a quick answer."""
from __future__ import annotations

import threading
import time
from typing import Protocol


class Bounded(Protocol):
    """What runs; `shut` ends its waits from another thread."""

    def shut(self) -> None: ...


_changed = threading.Condition()
_running: dict[Bounded, float] = {}  # until when, by `time.monotonic`
_looks_at: float | None = None  # when the thread looks next; None: there is none


def add(running: Bounded, seconds: float) -> None:
    """`running.shut()` is called once so much later, unless it is removed before."""
    global _looks_at
    until = time.monotonic() + seconds
    with _changed:
        _running[running] = until
        if _looks_at is None:
            threading.Thread(target=_watch, name="deadlines", daemon=True).start()
            _looks_at = until
        elif until < _looks_at:
            _looks_at = until
            _changed.notify()


def remove(running: Bounded) -> None:
    """It has ended."""
    with _changed:
        _running.pop(running, None)


def _watch() -> None:
    while (over := _wait()) is not None:
        for running in over:
            running.shut()


def _wait() -> list[Bounded] | None:
    """Those whose time is over, which are forgotten; None when nothing runs any more."""
    global _looks_at
    with _changed:
        if not _running:
            _looks_at = None
            return None
        _looks_at = min(_running.values())
        _changed.wait(max(0.0, _looks_at - time.monotonic()))
        now = time.monotonic()
        over = [running for running, until in _running.items() if until <= now]
        for running in over:
            del _running[running]
        return over
