"""Group commit: writers of one process that come at the same time share a transaction, and so one wait for the disk.

While one of them commits, the others gather; whoever of them came first writes for all.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import db, gathering
from app.gathering import Gathering, Item, Place


class GroupCommit(Generic[Item]):
    """`write` writes several items within a transaction; `shown` tells of those that were committed, before their
    writers go on. Together or alone, each item is committed or raises, whatever becomes of the others. `patience`:
    seconds, as of `Gathering`."""

    def __init__(
        self, write: Callable[[Connection, Sequence[Item]], None], shown: Callable[[Sequence[Item]], None],
        patience: float = 0.0,
    ) -> None:
        self._write, self._shown = write, shown
        self._gathering: Gathering[Item] = Gathering(self._lead, patience)

    def commit(self, item: Item) -> None:
        """Returns once the item is committed. Raises what `write` or the commit raised for it."""
        self._gathering.join(item)

    def _lead(self) -> None:
        places: list[Place[Item]] = []
        try:
            try:
                self._gathering.gather()  # before it stands in anybody's way
                with db.transaction() as tx:
                    places = self._gathering.take()
                    self._write(tx, [place.item for place in places])
            except Exception as error:
                self._after(error, places)
        except BaseException as error:
            places = places or self._gathering.take()
            _fail(places, error)
            raise
        finally:
            self._gathering.hand_over()
            self._settle(places)

    def _after(self, error: Exception, places: list[Place[Item]]) -> None:
        """Nothing of it was kept. What one item broke, the others do not suffer; a database that is away is so for
        all, and all have waited for it."""
        if not places:
            places += self._gathering.take()
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

    def _settle(self, places: list[Place[Item]]) -> None:
        try:
            if committed := [place.item for place in places if place.error is None]:
                self._shown(committed)
        finally:
            gathering.settle(places)


def _is_of_all(error: Exception) -> bool:
    return isinstance(error, DBAPIError | PoolTimeout) and db.is_away(error) and not db.is_contended(error)


def _fail(places: Sequence[Place[Item]], error: BaseException) -> None:
    for place in places:
        place.error = error
