"""`/docs`: Swagger UI for `/openapi.json`, from the files of a package: nothing is loaded from anywhere else."""
from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import flask_swagger_ui
from flask import Blueprint, Response, render_template_string, request

from app import errors

blueprint = Blueprint("docs", __name__)

_FOLDER = Path(flask_swagger_ui.__file__).parent / "dist"
_VERSION = version("flask-swagger-ui")
# Swagger UI writes style attributes, and its style sheet holds pictures as data.
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_KEPT_SECONDS = 86_400  # the version in their addresses changes with them

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>uketsuke</title>
<link rel="icon" type="image/png" href="{{ root }}/docs/favicon-32x32.png?v={{ version }}">
<link rel="stylesheet" href="{{ root }}/docs/swagger-ui.css?v={{ version }}">
<div id="docs" data-document="{{ root }}/openapi.json"></div>
<script src="{{ root }}/docs/swagger-ui-bundle.js?v={{ version }}"></script>
<script src="{{ root }}/docs/start.js?v={{ version }}"></script>
</html>
"""
# No validator: it is another machine's, and would be told this one's address.
_START = """"use strict";
const place = document.getElementById("docs");
SwaggerUIBundle({
  url: place.dataset.document, domNode: place, deepLinking: true, validatorUrl: null,
  queryConfigEnabled: false, persistAuthorization: false,
});
"""
FILES = {
    "start.js": "text/javascript; charset=utf-8", "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8", "favicon-32x32.png": "image/png",
}


@blueprint.get("/docs")
def show() -> Response:
    """The page."""
    page = render_template_string(_PAGE, root=request.script_root, version=_VERSION)
    return Response(page, content_type="text/html; charset=utf-8", headers={"Content-Security-Policy": _POLICY})


@blueprint.get("/docs/<file>")
def part(file: str) -> Response:
    """A file that the page loads."""
    if file not in FILES:
        raise errors.NotFound("the page has no such part")
    content = _START.encode() if file == "start.js" else (_FOLDER / file).read_bytes()
    return Response(content, content_type=FILES[file], headers={
        "Cache-Control": f"public, max-age={_KEPT_SECONDS}"})
