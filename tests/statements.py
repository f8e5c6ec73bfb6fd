"""The SQL that the test's process makes, as the drivers get it."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sqlalchemy import event

from app import db


@contextlib.contextmanager
def made_here() -> Iterator[list[tuple[str, Any]]]:
    """The statements of the block, with their values."""
    made: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        made.append((statement, values))

    engine = db.engine()
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield made
    finally:
        event.remove(engine, "before_cursor_execute", note)
