"""Holds answers to the OpenAPI document: status, content type, body and headers of each are described, or it is no
answer of this API."""
from __future__ import annotations

import functools
import re
from typing import Any

import jsonschema_rs
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.exceptions import MethodNotAllowed, NotFound

METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
_NOT_OURS = {"content-type", "content-length", "date", "server", "connection"}


def template(rule: str) -> str:
    """A rule of the routing as a path of the document."""
    return re.sub(r"<(?:[^:<>]+:)?([^<>]+)>", r"{\1}", rule)


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each operation with its name, `get /jobs`."""
    return [(f"{method} {path}", item[method])
            for path, item in document["paths"].items() for method in METHODS if method in item]


@functools.lru_cache(maxsize=1)
def described() -> dict[str, Any]:
    """The document; what it says of answers is the same whatever the settings and the kinds."""
    from app.api import openapi

    return openapi.document()


@functools.lru_cache(maxsize=1000)
def _validator(*place: str) -> jsonschema_rs.Draft202012Validator:
    """For the schema at this place of the document."""
    document = described()
    schema: Any = document
    for step in place:
        schema = schema[step]
    return jsonschema_rs.Draft202012Validator(
        {**schema, "components": document["components"]}, validate_formats=True)


class Client(FlaskClient):
    """A test client that holds every answer to the document."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().open(*args, **kwargs)
        check(self.application, answer)
        return answer


def client(app: Flask) -> FlaskClient:
    """A client of the application whose answers are all checked."""
    app.test_client_class = Client
    return app.test_client()


def check(app: Flask, answer: Any) -> None:
    """Fails with what the document does not say of this answer."""
    asked, status = answer.request, answer.status_code
    environ = {name: value for name, value in asked.environ.items() if name != "HTTP_UPGRADE"}  # which is not taken up
    try:
        rule, _ = app.url_map.bind_to_environ(environ).match(return_rule=True)
    except (NotFound, MethodNotAllowed) as error:
        assert status in (error.code, 401, 429, 503), f"{status} where {error.code} is due"
        return _check_stray(answer)
    if asked.method == "OPTIONS":
        return None
    path, method = template(str(rule)), asked.method.lower()
    if method not in described()["paths"][path]:
        assert method == "head"
        method = "get"
    place = ("paths", path, method, "responses", str(status))
    expected = described()["paths"][path][method]["responses"].get(str(status))
    assert expected is not None, f"{method} {path}: {status} is not described: {answer.text[:500]}"
    _check_headers(expected.get("headers", {}), answer, f"{method} {path} {status}")
    _check_body(expected.get("content", {}), place, answer)
    return None


def _check_stray(answer: Any) -> None:
    """An answer to what is no operation is a problem all the same."""
    assert answer.content_type == "application/problem+json"
    assert (answer.status_code == 405) is ("Allow" in answer.headers)
    assert (answer.status_code == 401) is ("WWW-Authenticate" in answer.headers)
    if answer.request.method != "HEAD":
        _validator("components", "schemas", "Problem").validate(answer.json)


def _check_headers(expected: dict[str, Any], answer: Any, where: str) -> None:
    for name, reference in expected.items():
        key = reference["$ref"].rsplit("/", 1)[1]
        given = answer.headers.getlist(name)
        assert given or not described()["components"]["headers"][key].get("required"), f"{where}: {name} is missing"
        for value in given:
            number = value.isascii() and value.isdigit()
            _validator("components", "headers", key, "schema").validate(int(value) if number else value)
    undescribed = {name.lower() for name in answer.headers.keys()} - {name.lower() for name in expected} - _NOT_OURS
    assert not undescribed, f"{where}: {undescribed} is not described"


def _check_body(content: dict[str, Any], place: tuple[str, ...], answer: Any) -> None:
    if answer.request.method == "HEAD" or not content:
        assert answer.data == b""
        return
    sort = next((sort for sort in (answer.content_type, answer.mimetype) if sort in content), "*/*")
    assert sort in content, f"{place}: {answer.content_type} is not described"
    if sort.endswith("json"):
        _validator(*place, "content", sort, "schema").validate(answer.json)
