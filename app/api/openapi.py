"""`/openapi.json`: the API described."""
from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, current_app, request

from app.api import answers

blueprint = Blueprint("openapi", __name__)


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document for the kinds and settings of this process, without `servers`."""
    from app.api import description  # with its library it takes a web process long to import: when somebody asks

    return description.document()


@blueprint.get("/openapi.json")
def show() -> Response:
    """The document, made once; only the prefix of its address is the request's."""
    made = current_app.extensions.get("openapi")
    if made is None:
        made = current_app.extensions["openapi"] = document()
    return answers.of_json({**made, "servers": [{"url": request.script_root or "/"}]})
