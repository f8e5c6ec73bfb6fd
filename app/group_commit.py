"""Group commit: writers of one process that come at the same time share a transaction, and so one wait for the disk.

While one of them commits, the others gather; whoever of them came first writes for all. Nobody waits for company.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import db

Item = TypeVar("Item")


class _Place(Generic[Item]):
    """A writer's place: `called` when its item is settled, or when it is to write for all that wait."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.settled = False
        self.error: BaseException | None = None
        self.called = threading.Lock()
        self.called.acquire()


class GroupCommit(Generic[Item]):
    """`write` writes several items within a transaction; `shown` tells of those that were committed, before their
    writers go on. Together or alone, each item is committed or raises, whatever becomes of the others."""

    def __init__(
        self, write: Callable[[Connection, Sequence[Item]], None], shown: Callable[[Sequence[Item]], None],
    ) -> None:
        self._write, self._shown = write, shown
        self._lock = threading.Lock()
        self._waiting: list[_Place[Item]] = []
        self._led = False

    def commit(self, item: Item) -> None:
        """Returns once the item is committed. Raises what `write` or the commit raised for it."""
        place = _Place(item)
        with self._lock:
            self._waiting.append(place)
            leads, self._led = not self._led, True
        if not leads:
            place.called.acquire()
        if not place.settled:
            self._lead()
        if place.error is not None:
            raise place.error

    def _lead(self) -> None:
        places: list[_Place[Item]] = []
        try:
            try:
                with db.transaction() as tx:
                    places = self._take()
                    self._write(tx, [place.item for place in places])
            except Exception as error:
                self._after(error, places)
        except BaseException as error:
            places = places or self._take()
            _fail(places, error)
            raise
        finally:
            self._hand_over()
            self._settle(places)

    def _take(self) -> list[_Place[Item]]:
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    def _after(self, error: Exception, places: list[_Place[Item]]) -> None:
        """Nothing of it was kept. What one item broke, the others do not suffer; a database that is away is so for
        all, and all have waited for it."""
        if not places:
            places += self._take()
        if len(places) == 1 or _is_of_all(error):
            _fail(places, error)
            return
        for number, place in enumerate(places):
            try:
                with db.transaction() as tx:
                    self._write(tx, [place.item])
            except Exception as own:
                place.error = own
                if _is_of_all(own):
                    _fail(places[number:], own)
                    return

    def _hand_over(self) -> None:
        with self._lock:
            following = self._waiting[0] if self._waiting else None
            self._led = following is not None
        if following is not None:
            following.called.release()

    def _settle(self, places: list[_Place[Item]]) -> None:
        try:
            if committed := [place.item for place in places if place.error is None]:
                self._shown(committed)
        finally:
            for place in places:
                place.settled = True
                place.called.release()


def _is_of_all(error: Exception) -> bool:
    return isinstance(error, DBAPIError | PoolTimeout) and db.is_away(error) and not db.is_contended(error)


def _fail(places: Sequence[_Place[Item]], error: BaseException) -> None:
    for place in places:
        place.error = error
