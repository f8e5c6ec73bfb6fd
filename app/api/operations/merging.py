"""A model's schema with the members that belong to the job itself, whatever shape the model has."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from app.api.operations import schemas

Schema = dict[str, Any]
_COMPOSED = {"allOf", "not", "if", "then", "else", "dependentSchemas", "dependentRequired"}


@dataclass(frozen=True)
class _Job:
    """What is added: the members of the job, which of them are required, and where a reference leads."""

    members: Mapping[str, Any]
    required: list[str]
    find: Callable[[str], Schema]


def of_model(name: str, model: type[BaseModel], more: Mapping[str, Any], required: list[str]) -> dict[str, Schema]:
    """By their names: the model's schema with further members, and those that it refers to. Raises whatever a model
    raises, ValueError when members cannot be added."""
    prefix = f"Part.{name}."
    template = f"#/components/schemas/{prefix}"
    schema = model.model_json_schema(ref_template=template + "{model}", schema_generator=schemas.Generator)
    parts = schema.pop("$defs", {})
    job = _Job(more, required, lambda reference: parts[reference.removeprefix(template)])
    made = _with(job, schema, frozenset()) or _nothing(job, schema)
    return {name: made, **{f"{prefix}{key}": schemas.of_the_door(part) for key, part in parts.items()}}


def _nothing(job: _Job, schema: Schema) -> Schema:
    return {"type": "object", "description": "It takes nothing that is an object, so it takes nothing.",
            "properties": dict(job.members), "required": job.required, "not": {}}


def _with(job: _Job, schema: Schema, seen: frozenset[str]) -> Schema | None:
    """None when it describes no object."""
    if "$ref" in schema:
        reference = schema["$ref"]
        return None if reference in seen else _with(job, job.find(reference), seen | {reference})
    if "properties" in schema:
        return _as_members(job, schemas.of_the_door(schema))
    choices = schema.get("anyOf", schema.get("oneOf"))
    if choices is not None:
        return _as_choices(job, schema, choices, seen)
    if schema.get("type", "object") != "object" or {"const", "enum"} & set(schema):
        return None
    if _COMPOSED & set(schema) or len(schema.get("patternProperties", {})) > 1:
        raise ValueError("a schema that members cannot be added to")
    return _as_names(job, schemas.of_the_door(schema))


def _as_members(job: _Job, schema: Schema) -> Schema:
    if job.members.keys() & schema["properties"].keys():
        raise ValueError("a member that belongs to the job")
    return {**schema, "properties": {**job.members, **schema["properties"]},
            "required": [*job.required, *schema.get("required", [])]}


def _as_choices(job: _Job, schema: Schema, choices: list[Schema], seen: frozenset[str]) -> Schema | None:
    """Each choice has the job's members: beside the choices, none of these would know them."""
    found = [made for made in (_with(job, choice, seen) for choice in choices) if made is not None]
    said: Schema = {key: schema[key] for key in ("title", "description") if key in schema}
    return {**said, "anyOf": found} if found else None


def _as_names(job: _Job, schema: Schema) -> Schema:
    """An object whose members have any names: what is asked of these is not asked of the job's own."""
    made = {key: value for key, value in schema.items() if key not in ("patternProperties", "propertyNames")}
    names = dict(schema.get("propertyNames", {}))
    for pattern, value in schema.get("patternProperties", {}).items():  # pydantic writes one, for every name
        names["pattern"], made["additionalProperties"] = pattern, value
    if names:
        made["propertyNames"] = {"anyOf": [{"enum": sorted(job.members)}, names]}
    if "minProperties" in made:
        made["minProperties"] += len(job.required)
    if "maxProperties" in made:
        made["maxProperties"] += len(job.members)
    return {**made, "type": "object", "properties": dict(job.members), "required": job.required}
