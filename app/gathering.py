"""Threads of one process that come at the same time share one way to the disk, or to Redis: whoever came first acts for
all that wait. While it does, the others gather."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Place(Generic[Item]):
    """Where a thread waits: `called` when its item is settled, or when it is to act for all that wait."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.settled = False
        self.error: BaseException | None = None
        self.called = threading.Lock()
        self.called.acquire()


class Gathering(Generic[Item]):
    """`lead` acts for all that wait: it is to `take` them, and then, whatever happened, to `hand_over` and to `settle`
    what it took. One thread leads at a time. It may `gather` first: as many as came together the last time are expected
    to come together again, and are waited for, `patience` seconds at most. Who comes alone never waits for company."""

    def __init__(self, lead: Callable[[], None], patience: float = 0.0) -> None:
        self._lead = lead
        self._patience = patience
        self._expected = 1
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[Place[Item]] = []
        self._led = False

    def join(self, item: Item) -> None:
        """Returns once the item is settled, by an act that began after it came. Raises the error of its place."""
        place = Place(item)
        with self._lock:
            self._waiting.append(place)
            leads, self._led = not self._led, True
            if self._patience and len(self._waiting) >= self._expected:
                self._enough.set()
        if not leads:
            place.called.acquire()
        if not place.settled:
            self._lead()
        if place.error is not None:
            raise place.error

    def gather(self) -> None:
        """Waits until as many have come as the last time."""
        if self._patience and self._expected > 1:
            self._enough.wait(self._patience)

    def take(self) -> list[Place[Item]]:
        """All that wait, the leader among them."""
        with self._lock:
            taken, self._waiting, self._expected = self._waiting, [], len(self._waiting)
            if self._patience:
                self._enough.clear()
        return taken

    def hand_over(self) -> None:
        """Whoever has come first since leads next."""
        with self._lock:
            following = self._waiting[0] if self._waiting else None
            self._led = following is not None
        if following is not None:
            following.called.release()


def settle(places: Sequence[Place[Item]]) -> None:
    """Lets those go on who wait there."""
    for place in places:
        place.settled = True
        place.called.release()
