"""What the lists may be asked for."""
from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from flask import request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app import ids
from app.api import door
from app.api.problems import Problem
from app.errors import Flaw, InvalidInput

MAX_LIMIT = 100  # some 30 kB without results, and those are bounded by themselves (`pages.RESULT_BYTES`)

Asked = TypeVar("Asked", bound="Page")


def _cursor(text: Any) -> Any:
    if text is not None and not ids.is_id(text):
        raise ValueError("must be the cursor of a next link")
    return text


def _digits(text: Any) -> Any:
    """A number in its one spelling; pydantic would take `+5`, `1_0` and `5.0` too."""
    if isinstance(text, str) and not re.fullmatch("[1-9][0-9]{0,9}|0", text):
        raise ValueError("must be a whole number")
    return text


class Page(BaseModel):
    """Which part of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, BeforeValidator(_digits)] = Field(20, ge=1, le=MAX_LIMIT, description="how many at most")


class JobsQuery(Page):
    """`GET /jobs`."""

    status: Literal["queued", "running", "succeeded", "failed"] | None = Field(None, description="only of this status")
    kind: str | None = Field(
        None, pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$", description="only of this kind")
    cursor: Annotated[str | None, BeforeValidator(_cursor)] = Field(
        None, description="from the Link of the page before", json_schema_extra={"pattern": f"^{ids.PATTERN}$"})


class NotesQuery(Page):
    """`GET /notes`."""

    cursor: Annotated[int | None, BeforeValidator(_digits)] = Field(
        None, ge=1, le=2**31 - 1, description="from the Link of the page before")


def read(query: type[Asked]) -> Asked:
    """The request's query; an empty value is one that is not given. Raises InvalidInput, and the
    problem `bad-request` for bytes that are no text."""
    try:
        asked = list(request.args.lists())
    except UnicodeDecodeError:
        raise Problem("bad-request", "the query is not UTF-8") from None
    given = {}
    for name, values in asked:
        if len(values) > 1:
            raise InvalidInput([Flaw(door.pointer((name,)), "is there twice")])
        if values[0]:
            given[name] = values[0]
    try:
        return query.model_validate_strings(given)
    except ValidationError as error:
        raise door.flaws(error) from None
