"""What POST takes, described by the models that validate it."""
from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from openapi_pydantic.v3.v3_1 import Example, MediaType, RequestBody, Schema
from pydantic import BaseModel

from app import logs
from app.api.operations import merging
from app.api.operations.parts import reference
from app.addresses import MAX_URL_LENGTH
from app.kinds import Kind

log = logging.getLogger("uketsuke.api")

_URL = r"^[Hh][Tt][Tt][Pp][Ss]?://[^/?#@\s\\]+([/?][^#\s]*)?$"

CALLBACK_URL = {
    "description": "Where the job's end is told (Standard Webhooks). http or https, without user info or fragment, and "
                   "not an address of a private network unless CALLBACK_ALLOW opens it.",
    "anyOf": [{"type": "string", "format": "uri", "pattern": _URL, "maxLength": MAX_URL_LENGTH}, {"type": "null"}]}

_UNSAID = "What it takes cannot be said here: the service says it when it refuses."
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')

Schemas = dict[str, dict[str, Any]]


def of_jobs(public: Iterable[Kind], default: str) -> tuple[RequestBody, Schemas]:
    """The body of POST /jobs, a variant for each kind, and the schemas that it refers to."""
    components: Schemas = {}
    for kind in public:
        components |= _variant(kind, default)
    body = _body([name for name in components if name.startswith("NewJob.")], {
        "five": {"n": 5}, "named": {"kind": default, "n": 1_000_000}})
    return body, components


def of_notes(model: type[BaseModel]) -> tuple[RequestBody, Schemas]:
    """The body of POST /notes, and the schemas that it refers to."""
    components = _named("NewNote", model, {"callback_url": CALLBACK_URL}, [])
    return _body(["NewNote"], {"note": {"text": "Water the tomatoes."}}), components


def _body(names: list[str], examples: Mapping[str, Any]) -> RequestBody:
    choices = [reference("schemas", name) for name in names]
    schema = Schema(oneOf=[*choices]) if len(choices) > 1 else choices[0]
    return RequestBody(required=True, description="At most 1 MiB, at most 32 levels deep.", content={
        "application/json": MediaType(
            schema=schema, examples={name: Example(value=value) for name, value in examples.items()})})


def _variant(kind: Kind, default: str) -> Schemas:
    job: Schemas = {"kind": {"const": kind.name, "type": "string", "description": "What sort of job it is."},
                    "callback_url": CALLBACK_URL}
    if kind.name == default:
        job["kind"]["default"] = default
    return _named(f"NewJob.{kind.name}", kind.input, job, [] if kind.name == default else ["kind"])


def _named(name: str, model: type[BaseModel], more: Mapping[str, Any], required: list[str]) -> Schemas:
    """The model's schema with further members, and those that it refers to, all as strict as the door. It is an open
    one when there is no other: one model takes the document from nobody."""
    try:
        found = merging.of_model(name, model, more, required)
        check(found)
        return found
    except Exception as error:  # whatever a stranger's model does when it is asked what it takes
        log.warning("an input cannot be described", extra={"schema": name, **logs.where(error)})
        return {name: {"type": "object", "description": _UNSAID, "properties": dict(more), "required": required}}


def check(schemas: Schemas) -> None:
    """Raises when this is not JSON, not JSON Schema, or refers to what is not there."""
    text = json.dumps(schemas, ensure_ascii=False, allow_nan=False)
    text.encode()
    for schema in schemas.values():
        Schema.model_validate(schema)
    missing = set(_REFERENCE.findall(text)) - {f"#/components/schemas/{name}" for name in schemas}
    if missing:
        raise ValueError("a reference leads nowhere")
