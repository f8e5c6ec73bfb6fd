"""The SQL that the test's process makes, as the drivers get it."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sqlalchemy import event

from app import db, statements


@contextlib.contextmanager
def made_here() -> Iterator[list[tuple[str, Any]]]:
    """The statements of the block, with their values."""
    made: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        made.append((statement, values))

    def execute(tx: Any, ready: Any, values: Any, many: bool = False) -> Any:
        made.extend((ready.text, each) for each in (values if many else [values]))
        return directly(tx, ready, values, many)

    engine, directly = db.engine(), statements._execute
    event.listen(engine, "before_cursor_execute", note)
    statements._execute = execute
    try:
        yield made
    finally:
        event.remove(engine, "before_cursor_execute", note)
        statements._execute = directly
