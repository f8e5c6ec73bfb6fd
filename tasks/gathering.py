"""What several threads have to write at one moment, one of them writes for all: a transaction costs as much for four as
for one, and SQLite has one at a time."""
from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(eq=False)
class _Part(Generic[Given, Made]):
    given: Given
    turn: threading.Event = field(default_factory=threading.Event)
    made: list[Made] = field(default_factory=list)  # one, when it has been written
    failed: bool = False  # together with others; nothing is written of it


class Gathering(Generic[Given, Made]):
    """Writes what comes while the write before goes on, at once."""

    def __init__(self, write: Callable[[Sequence[Given]], list[Made]]) -> None:
        """`write` writes all or nothing, and returns what came of each."""
        self._write = write
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[_Part[Given, Made]]] = {}  # a key is here while somebody writes for it

    def put(self, key: Hashable, given: Given) -> Made:
        """Writes this, perhaps with others of this key. When it fails with others it is tried alone: so what one cannot
        have written keeps nobody else from it. Raises what `write` raises for it alone."""
        part: _Part[Given, Made] = _Part(given)
        with self._lock:
            leads = key not in self._waiting
            if leads:
                self._waiting[key] = []
            else:
                self._waiting[key].append(part)
        if not leads:
            part.turn.wait()
        if part.made:
            return part.made[0]
        return self._write([given])[0] if part.failed else self._lead(key, part)

    def _lead(self, key: Hashable, first: _Part[Given, Made]) -> Made:
        with self._lock:
            others = [part for part in self._waiting[key] if part is not first]
            self._waiting[key] = []
        try:
            parts = [first, *others]
            for part, made in zip(parts, self._write([part.given for part in parts])):
                part.made.append(made)
        except Exception:
            if not others:
                raise
        finally:
            self._hand_on(key)
            for part in others:
                part.failed = not part.made
                part.turn.set()
        return first.made[0] if first.made else self._write([first.given])[0]

    def _hand_on(self, key: Hashable) -> None:
        """Whoever has waited longest writes next."""
        with self._lock:
            if self._waiting[key]:
                self._waiting[key][0].turn.set()
            else:
                del self._waiting[key]
