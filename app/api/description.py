"""The API described, from the models that validate, the answers' models and the TABLE of problems."""
from __future__ import annotations

import json
from typing import Any

from openapi_pydantic.util import construct_open_api_with_schema_class
from openapi_pydantic.v3.v3_1 import Components, Info, OpenAPI, SecurityScheme, Tag

from app import kinds
from app.api.jobs import DEFAULT_KIND
from app.api.notes import NewNote
from app.api.operations import bodies, jobs, notes, parts, service
from app.config import settings

VERSION = "0.1.0"
_ABOUT = """The reception desk for work that takes its time: a `202` means that the job is kept, whatever dies from here
on.

Every error is a problem (RFC 9457) whose `type` leads to a page that explains it. HEAD works wherever GET does. OPTIONS
is answered with `Allow`, and so is a method that an address does not have (405). JSON is read strictly: UTF-8, no
member twice, no NaN, no NUL and no half of a surrogate pair in a text, at most 1 MiB and 32 levels."""
_TAGS = {
    "jobs": "Work that was asked for.", "notes": "Texts with a history.", "service": "What the service says of itself."}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document for the kinds and settings of this process, without `servers`."""
    closed = bool(settings().api_tokens)
    public = sorted((kind for kind in kinds.registry().values() if kind.public), key=lambda kind: kind.name)
    job_body, job_schemas = bodies.of_jobs(public, DEFAULT_KIND)
    note_body, note_schemas = bodies.of_notes(NewNote)
    described = OpenAPI(
        openapi="3.1.1", info=Info(title="uketsuke", version=VERSION, description=_ABOUT),
        tags=[Tag(name=name, description=text) for name, text in _TAGS.items()],
        paths={**jobs.paths(job_body, closed), **notes.paths(note_body, closed), **service.paths(closed)},
        components=Components(
            headers={parts.component(name): header for name, header in parts.HEADERS.items()},
            securitySchemes={parts.SECURITY: SecurityScheme(
                type="http", scheme="bearer", description="A token of API_TOKENS, when the service has any.")}))
    made = _as_written(construct_open_api_with_schema_class(described))
    made["components"]["schemas"] |= {**job_schemas, **note_schemas}
    return made


def _as_written(described: OpenAPI) -> dict[str, Any]:
    """Without what goes without saying; the library keeps every bound as a float."""
    text = described.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
    return {"openapi": described.openapi, **json.loads(text, parse_float=_number)}


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
