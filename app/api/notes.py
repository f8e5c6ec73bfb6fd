"""`/notes`: a note is kept at once, its history is written later."""
from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, Response, request
from pydantic import BaseModel, Field, ValidationError

from app import clock, db, kinds, notes, pages, submissions
from app.api import answers, door, queries, tokens
from app.clock import isoformat
from app.errors import NotFound
from app.notes import Note

blueprint = Blueprint("notes", __name__)


class NewNote(BaseModel):
    """What `POST /notes` takes beside `callback_url`."""

    text: Annotated[str, Field(min_length=1, max_length=10_000)]


@blueprint.post("/notes")
def submit() -> Response:
    """Keeps a note and accepts its history job: 202 once both are committed."""
    history = kinds.registry()["history"]
    given = door.read_object()
    key = door.key_of(given)
    if (first := submissions.replay(tokens.owner(), key)) is not None:
        return answers.accepted(first, history.name)
    members = dict(given)
    callback_url = door.callback_url(members)
    try:
        new = NewNote.model_validate(members, strict=True, extra="forbid")
    except ValidationError as error:
        raise door.flaws(error) from None
    return answers.accepted(submissions.submit_note(
        tokens.owner(), new.text, history, callback_url, key, clock.now(), request.script_root), history.name)


@blueprint.get("/notes")
def index() -> Response:
    """The owner's notes, newest first."""
    asked = queries.read(queries.NotesQuery)
    with db.reading() as view:
        found = pages.notes_of(view, tokens.owner(), asked.limit, asked.cursor)
    return answers.page("notes", [_document(note) for note in found.notes], found.cursor)


@blueprint.get("/notes/<note_id>")
def show(note_id: str) -> Response:
    """The note."""
    return answers.of_json(_document(_find(note_id)))


@blueprint.get("/notes/<note_id>/events")
def events(note_id: str) -> Response:
    """The note's history so far."""
    note = _find(note_id)
    with db.reading() as view:
        found = notes.events(view, note.id)
    return answers.of_json({"events": [
        {"kind": event.kind, "job_id": event.job_id, "at": isoformat(event.at)} for event in found]})


def _document(note: Note) -> dict[str, Any]:
    return {"id": note.id, "text": note.text, "created_at": isoformat(note.created_at)}


def _find(text: str) -> Note:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or text != str(int(text)):
        raise NotFound("no note has this id")
    with db.reading() as view:
        note = notes.find(view, int(text))
    if note is None or note.owner != tokens.owner():
        raise NotFound("no note has this id")
    return note
