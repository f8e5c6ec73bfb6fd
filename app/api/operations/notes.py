"""The operations of `/notes`."""
from __future__ import annotations

from functools import partial

from openapi_pydantic.v3.v3_1 import PathItem, RequestBody

from app.api import models, queries
from app.api.operations.jobs import ACCEPTED_HEADERS, IDEMPOTENCY_KEY, SUBMISSION, job_links
from app.api.operations.parts import answer, link, operation, parameter, query

_TEXT = "Water the tomatoes."
_NOTE = {"id": 1, "text": _TEXT, "created_at": "2026-11-29T18:40:00.123Z"}
_EVENT = {"kind": "created", "job_id": models.JOB_ID, "at": "2026-11-29T18:40:00.345Z"}
_NOTE_ID = parameter("path", "note_id", "The note's id.", models.Note.model_json_schema()["properties"]["id"], 1)


def paths(body: RequestBody, closed: bool) -> dict[str, PathItem]:
    """The path items of `/notes`."""
    described = partial(operation, tag="notes", closed=closed)
    here = "$response.body#/id"
    return {
        "/notes": PathItem(
            get=described(
                "listNotes", summary="List the notes, the newest first", refusals=["invalid-input"], instance="/notes",
                parameters=query(queries.NotesQuery),
                answers={200: answer("A page.", models.NoteList, "Link", page={"notes": [_NOTE]})}),
            post=described(
                "submitNote", summary="Leave a note", refusals=SUBMISSION, instance="/notes",
                body=body, parameters=[IDEMPOTENCY_KEY],
                description="The note and the job that writes its history are kept in one transaction.",
                answers={202: answer(
                    "The note is kept.", models.NoteAccepted, *ACCEPTED_HEADERS, "Link",
                    links=job_links(getNote=link("getNote", note_id=here), listEvents=link("listEvents", note_id=here)),
                    accepted={"id": 1, "text": _TEXT, "job_id": models.JOB_ID,
                              "status_url": f"/jobs/{models.JOB_ID}"})})),
        "/notes/{note_id}": PathItem(parameters=[_NOTE_ID], get=described(
            "getNote", summary="Read a note", refusals=["not-found"], instance="/notes/1",
            answers={200: answer("The note.", models.Note, note=_NOTE)})),
        "/notes/{note_id}/events": PathItem(parameters=[_NOTE_ID], get=described(
            "listEvents", summary="Read a note's history", refusals=["not-found"], instance="/notes/1/events",
            answers={200: answer("The history so far.", models.EventList, none={"events": []},
                                 created={"events": [_EVENT]})})),
    }
