"""The writers' queue of a SQLite file: an flock beside it, whose waiters the kernel serves in order.

SQLite's own busy handler sleeps and polls, which costs a second at the 99th percentile with 8 writers. A killed process
frees its flock at once.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator


class TurnTimeout(Exception):
    """The wait was over before it was this writer's turn."""


class Turnstile:
    """This process's place in the queue: one of its threads stands in the kernel's queue, the others wait here.

    An flock cannot be waited for with a time limit, and a thread that stood there for the others would cost as much as
    the transaction itself. So when a writer elsewhere hangs, one thread of each process hangs with it, and all others
    are told within their time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._holder: int | None = None  # a thread's ident
        self._waiting: dict[int, threading.Event] = {}  # in the order of their coming

    @contextlib.contextmanager
    def turn(self, until: float) -> Iterator[None]:
        """Holds the turn for the block. Raises TurnTimeout when it does not come by `until` (`time.monotonic`)."""
        try:
            self._enter(until)
            # Opened for each turn: forked processes that share an open file would share its lock.
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile holds the same open file
                os.close(descriptor)
        finally:
            self._leave()  # from wherever: a time limit may raise at any point of this

    def _enter(self, until: float) -> None:
        this = threading.get_ident()
        with self._lock:
            if self._holder is None:
                self._holder = this
                return
            called = self._waiting[this] = threading.Event()
        called.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            if self._holder != this:
                raise TurnTimeout

    def _leave(self) -> None:
        """Neither waits nor holds any more; what it held goes to the one that has waited longest."""
        this = threading.get_ident()
        with self._lock:
            self._waiting.pop(this, None)
            if self._holder != this:
                return
            self._holder = next(iter(self._waiting), None)
            if self._holder is not None:
                self._waiting.pop(self._holder).set()
