"""Notes and their history."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, insert, select

from app import statements
from app.schema import history_events, notes

MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Note:
    id: int
    owner: str
    text: str
    created_at: datetime


@dataclass(frozen=True)
class Event:
    kind: str
    job_id: str
    at: datetime


_add = insert(notes).returning(notes.c.id, sort_by_parameter_order=True)
_find = select(notes.c.id, notes.c.owner, notes.c.text, notes.c.created_at).where(notes.c.id == bindparam("note_id"))
_append = insert(history_events).values({name: bindparam(name) for name in ("note_id", "kind", "job_id", "at")})
_events = select(history_events.c.kind, history_events.c.job_id, history_events.c.at).where(
    history_events.c.note_id == bindparam("of_note")).order_by(history_events.c.id)


def add(tx: Connection, texts: Sequence[tuple[str, str]], now: datetime) -> list[int]:
    """Keeps notes, each an owner's text, and returns their ids in this order. The caller submits their history jobs in
    the same transaction."""
    return list(tx.execute(
        _add, [{"owner": owner, "text": text, "created_at": now} for owner, text in texts]).scalars())


def find(view: Connection, note_id: int) -> Note | None:
    """The note with this id; None when there is none."""
    if not 0 < note_id <= MAX_ID:
        return None
    row = view.execute(_find, {"note_id": note_id}).first()
    return None if row is None else Note(*row)


def append_event(tx: Connection, note_id: int, kind: str, job_id: str, now: datetime) -> None:
    """Writes one line of a note's history. A second event of the same kind breaks the table's constraint."""
    statements.changed(tx, _append, {"note_id": note_id, "kind": kind, "job_id": job_id, "at": now})


def events(view: Connection, note_id: int) -> list[Event]:
    """A note's history, the oldest event first."""
    return [Event(*row) for row in view.execute(_events, {"of_note": note_id})]
