"""What the described operations are made of: answers, their headers, and the refusals of the TABLE."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openapi_pydantic.util import PydanticSchema
from openapi_pydantic.v3.v3_1 import (
    Example, Header, Link, MediaType, Operation, Parameter, Reference, RequestBody, Response, Schema,
)
from pydantic import BaseModel

from app.api import models
from app.api.problems import TABLE

SECURITY = "bearer"
REQUEST_ID = "6f1c9a52-0f0e-4c7b-9a51-3c8f5d2a7e10"

_SECONDS = {"type": "integer", "minimum": 1, "maximum": 60}
_PATH = {"type": "string", "pattern": "^/"}


def _header(description: str, schema: Mapping[str, Any], required: bool = False) -> Header:
    return Header(description=description, required=required, schema=Schema.model_validate(schema))


# By the name under which components keep them; one that is always there is required.
HEADERS: dict[str, Header] = {
    "X-Request-Id": _header("The request's name in the logs.", {"type": "string", "format": "uuid"}, True),
    "Cache-Control": _header("Who may keep the answer.", {"type": "string"}, True),
    "X-Content-Type-Options": _header("The content type is meant.", {"const": "nosniff"}, True),
    "Location": _header("Where the job is polled.", _PATH, True),
    "Retry-After": _header("After how many seconds to ask again.", _SECONDS, True),
    "Retry-After!": _header("After how many seconds to repeat the request.", {"type": "integer", "minimum": 1}, True),
    "WWW-Authenticate": _header("Which scheme is asked for.", {"type": "string", "pattern": "^Bearer "}, True),
    "ETag": _header("A strong tag of this state.", {"type": "string", "pattern": '^"[^"]+"$'}, True),
    "Vary": _header("Which request headers the answer hangs on.", {"type": "string"}, True),
    "Sunset": _header("When a finished job expires (RFC 8594).", {"type": "string", "pattern": " GMT$"}),
    "Preference-Applied": _header("The wait that was honoured.", {"type": "string", "pattern": "^wait"}),
    "Link": _header(
        "The note (`related`), or the next page (`next`).", {"type": "string", "pattern": "^<[^>]*>; rel="}),
    "Idempotent-Replayed": _header("The key was used before: this is its first answer.", {"const": "true"}),
    "Content-Security-Policy": _header("What the page may load.", {"type": "string"}, True),
}
_OPTIONAL = {"Location?": "Location", "Retry-After?": "Retry-After"}
for _name, _of in _OPTIONAL.items():
    HEADERS[_name] = HEADERS[_of].model_copy(update={"required": False})

_ALWAYS = ("X-Request-Id", "Cache-Control", "X-Content-Type-Options")


def component(name: str) -> str:
    """The header's key among the components; `?` marks a variant that may be missing, `!` that of a refusal."""
    return name.replace("?", ".sometimes").replace("!", ".refused")


def reference(sort: str, name: str) -> Reference:
    """A reference to a component."""
    return Reference.model_validate({"$ref": f"#/components/{sort}/{name}"})


def _headers(names: Iterable[str]) -> dict[str, Header | Reference]:
    return {name.rstrip("?!"): reference("headers", component(name)) for name in (*_ALWAYS, *names)}


def answer(
    description: str, model: type[BaseModel] | None = None, *headers: str, content_type: str = "application/json",
    links: Mapping[str, Link] | None = None, **examples: Any,
) -> Response:
    """An answer whose body is what the model describes, or (without one) a text, or nothing."""
    schema: Any = PydanticSchema(schema_class=model) if model else Schema(type="string")
    shown = {name: Example(value=value) for name, value in examples.items()}
    return Response(
        description=description, headers=_headers(headers), links=dict(links) if links else None,
        content={content_type: MediaType(schema=schema, examples=dict(shown) or None)} if content_type else None)


def nothing(description: str, *headers: str) -> Response:
    """An answer without a body."""
    return answer(description, None, *headers, content_type="")


def link(operation_id: str, **parameters: str) -> Link:
    """Where to go from here; parameters are runtime expressions."""
    return Link(operationId=operation_id, parameters=dict(parameters))


# --- refusals ---

_HEADERS_OF_STATUS = {401: ["WWW-Authenticate"], 429: ["Retry-After!"], 503: ["Retry-After!"]}
_MEMBERS: dict[str, dict[str, Any]] = {
    "invalid-input": {"errors": [{"pointer": "#/n", "detail": "Input should be less than or equal to 1000000000"}]},
    "key-reused": {"location": f"/jobs/{models.JOB_ID}"},
    "expired": {
        "job_id": models.JOB_ID, "kind": "primes", "job_status": "succeeded",
        "finished_at": "2026-11-29T18:40:02.345Z", "expired_at": "2026-11-30T18:40:02.345Z"},
}


def _refusals(names: Iterable[str], instance: str, with_body: bool) -> dict[str, Response]:
    by_status: dict[int, list[str]] = {}
    for name in names:
        if name in TABLE:
            by_status.setdefault(TABLE[name].status, []).append(name)
    return {str(status): _refusal(status, found, instance, with_body) for status, found in sorted(by_status.items())}


def _refusal(status: int, names: list[str], instance: str, with_body: bool) -> Response:
    headers = [*_HEADERS_OF_STATUS.get(status, []), *(["Location?"] if "key-reused" in names else [])]
    description = " ".join(f"`{name}`: {TABLE[name].title}." for name in names)
    if not with_body:
        return nothing(description, *headers)
    examples = {name: _example(name, instance) for name in names}
    return answer(description, models.Problem, *headers, content_type="application/problem+json", **examples)


def _example(name: str, instance: str) -> dict[str, Any]:
    entry = TABLE[name]
    return {
        "type": f"/problems/{name}", "title": entry.title, "status": entry.status, "detail": entry.advice,
        "instance": instance, "request_id": REQUEST_ID, **_MEMBERS.get(name, {})}


def operation(
    operation_id: str, tag: str, summary: str, answers: Mapping[int, Response], refusals: Iterable[str] = (), *,
    description: str | None = None, parameters: Iterable[Parameter] = (), body: RequestBody | None = None,
    instance: str = "/", open: bool = False, limited: bool = True, with_body: bool = True,
    closed: bool = False,
) -> Operation:
    """One operation. One that is not open needs a token, if the service has any (`closed`); one that is `limited` too
    counts against its owner's rate, and asks the database."""
    guards = [] if open else ["unauthorized", *(["rate-limited", "unavailable"] if limited else [])]
    names = [*refusals, "bad-request", *guards, "internal"]
    asked: list[dict[str, list[str]]] = [] if open else [{SECURITY: []}] if closed else [{}, {SECURITY: []}]
    return Operation(
        operationId=operation_id, tags=[tag], summary=summary, description=description,
        parameters=list(parameters) or None, requestBody=body, security=asked,
        responses={**{str(status): one for status, one in answers.items()},
                   **_refusals(dict.fromkeys(names), instance, with_body)})


def parameter(place: str, name: str, description: str, schema: Mapping[str, Any], example: Any = None) -> Parameter:
    """A parameter of the path (then it is required), the query or a header."""
    return Parameter.model_validate({
        "name": name, "in": place, "description": description, "required": place == "path", "schema": schema,
        **({"example": example} if example is not None else {})})


def query(model: type[BaseModel]) -> list[Parameter]:
    """The parameters that a query model takes."""
    return [_of_query(name, dict(schema)) for name, schema in model.model_json_schema()["properties"].items()]


def _of_query(name: str, schema: dict[str, Any]) -> Parameter:
    """A query has no null: a parameter that is not given is missing, or empty."""
    for choice in schema.pop("anyOf", []):
        if choice != {"type": "null"}:
            schema |= choice
    if schema.get("default", 0) is None:
        del schema["default"]
    description = schema.pop("description")
    made = parameter("query", name, description, {key: value for key, value in schema.items() if key != "title"})
    return made.model_copy(update={"allowEmptyValue": True})
