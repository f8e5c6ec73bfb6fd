"""What POST takes, described by the models that validate it."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openapi_pydantic.v3.v3_1 import Example, MediaType, RequestBody, Schema
from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from app.api.operations.parts import reference
from app.endpoints import MAX_URL_LENGTH
from app.kinds import Kind

_TEXT = "^[^\\u0000]*$"  # what the door takes in any text; halves of surrogate pairs cannot be written here
_URL = r"^[Hh][Tt][Tt][Pp][Ss]?://[^/?#@\s\\]+([/?][^#\s]*)?$"

CALLBACK_URL = {
    "description": "Where the job's end is told (Standard Webhooks). http or https, without user info or fragment, and "
                   "not an address of a private network unless CALLBACK_ALLOW opens it.",
    "anyOf": [{"type": "string", "format": "uri", "pattern": _URL, "maxLength": MAX_URL_LENGTH}, {"type": "null"}]}

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "dependentSchemas")

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
    """The model's schema with further members, and those that it refers to, all as strict as the door."""
    prefix = f"Part.{name}."
    try:
        schema = model.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    except PydanticInvalidForJsonSchema:  # it validates what no schema can describe
        schema = {"type": "object", "description": model.__doc__ or "", "properties": {}, "additionalProperties": True}
    definitions = schema.pop("$defs", {})
    if "$ref" in schema:  # a model that holds itself
        schema = dict(definitions[schema["$ref"].removeprefix(f"#/components/schemas/{prefix}")])
    strict = _as_the_door(schema)
    if schema.get("additionalProperties") is True and not schema["properties"]:
        strict["additionalProperties"] = True
    strict["properties"] = {**more, **strict.get("properties", {})}
    strict["required"] = [*required, *strict.get("required", [])]
    return {name: strict, **{f"{prefix}{key}": _as_the_door(value) for key, value in definitions.items()}}


def _as_the_door(schema: Any) -> Any:
    """As pydantic describes it, and as the door reads it: no unknown members, no NUL in a text."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _ONE:
        if key in made:
            made[key] = _as_the_door(made[key])
    for key in _LISTS:
        if key in made:
            made[key] = [_as_the_door(one) for one in made[key]]
    for key in _MAPS:
        if key in made:
            made[key] = {name: _as_the_door(one) for name, one in made[key].items()}
    if "properties" in made:
        made["additionalProperties"] = False
    if made.get("type") == "string" and not {"pattern", "enum", "const", "format"} & set(made):
        made["pattern"] = _TEXT
    return made
