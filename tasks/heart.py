"""Threads that beat for running attempts. Each is kept for the next attempt: to start one and to wait for its end costs
a short job more than its own work."""
from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import Protocol

from app import logs

log = logging.getLogger("uketsuke.heart")

_AGAIN_SECONDS = 1.0  # after a beat that failed in a way that nobody has thought of

_idle: list[Heart] = []
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's


class Beating(Protocol):
    """What a heart beats for."""

    def beat(self) -> float:
        """Does what is due; returns in how many seconds it wants the next one."""


def take() -> Heart:
    """A heart for one attempt, to be given back."""
    try:
        return _idle.pop()
    except IndexError:
        return Heart()


class Heart:
    """A thread, and the attempt that it beats for now."""

    def __init__(self) -> None:
        self._attempt: Beating | None = None
        self._due_at = self._wakes_at = math.inf  # `time.monotonic`
        self._state = threading.Lock()  # held for the length of a beat, too
        self._sooner = threading.Event()
        threading.Thread(target=self._live, name="heart", daemon=True).start()

    def begin(self, attempt: Beating, first_seconds: float) -> None:
        """Beats for this attempt from now on, first after so many seconds."""
        with self._state:
            self._attempt, self._due_at = attempt, time.monotonic() + first_seconds
            if self._due_at < self._wakes_at:  # as a rule it wakes for an attempt before this one anyway
                self._sooner.set()

    def give_back(self) -> None:
        """After this there is no beat, and none is under way."""
        try:
            self._attempt = None  # first: there is no further one, even if a time limit interrupts the wait
            with self._state:
                pass
        finally:
            _idle.append(self)

    def _live(self) -> None:
        while True:
            with self._state:
                if (attempt := self._attempt) is not None and time.monotonic() >= self._due_at:
                    self._due_at = time.monotonic() + _beat(attempt)
                self._wakes_at = math.inf if self._attempt is None else self._due_at
            self._sooner.wait(None if self._wakes_at == math.inf else max(0.0, self._wakes_at - time.monotonic()))
            self._sooner.clear()


def _beat(attempt: Beating) -> float:
    try:
        return attempt.beat()
    except Exception as error:  # the thread must live: the next attempt's lease hangs on it too
        log.error("a beat failed", extra=logs.where(error))
        return _AGAIN_SECONDS
