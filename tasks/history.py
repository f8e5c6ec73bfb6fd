"""The built-in kind `history`: writes that a note was created. Submitted by notes only."""
from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from sqlalchemy import Connection

from app import clock, notes
from app.kinds import Job, kind

# SQL is all that it touches, so what stops it is a database in trouble: it keeps trying for some ten minutes.
_MAX_ATTEMPTS = 25


class History(BaseModel):
    """Whose history."""

    note_id: int


@kind("history", History, max_attempts=_MAX_ATTEMPTS, time_limit=60, transactional=True,
      together=True, public=False)
def history(input: History, job: Job, tx: Connection) -> dict[str, Any]:
    """The event `created`, in the very commit that makes the job succeed."""
    notes.append_event(tx, input.note_id, "created", job.id, clock.now())
    return {"note_id": input.note_id, "event": "created"}
