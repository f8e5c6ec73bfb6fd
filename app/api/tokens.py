"""Who may: bearer tokens (RFC 6750) from API_TOKENS; without any, everybody is the same owner."""
from __future__ import annotations

import hmac

from flask import current_app, g, request
from flask_httpauth import HTTPTokenAuth
from werkzeug.exceptions import MethodNotAllowed

from app.config import EVERYBODY, settings

_OPEN_ENDPOINTS = ("health.", "problems.", "openapi.", "docs.")

_auth = HTTPTokenAuth(scheme="Bearer", realm="uketsuke")


@_auth.verify_token
def _owner_of(token: str) -> str | None:
    """The owner of a token, compared with each known one in constant time."""
    given, owner = token.encode("utf-8", "surrogateescape"), None
    for entry in settings().api_tokens:
        name, _, known = entry.partition(":")
        if hmac.compare_digest(given, known.encode()):
            owner = name
    return owner


@_auth.error_handler
def _refuse() -> None:
    from app.api.problems import Problem

    raise Problem("unauthorized", "a bearer token is needed", headers={"WWW-Authenticate": _auth.authenticate_header()})


def is_open() -> bool:
    """Whether everybody may ask for this request's route, with a token or without."""
    return _endpoint().startswith(_OPEN_ENDPOINTS)


def _endpoint() -> str:
    """The route that was asked for, by a method that it does not take too: an open one needs no token to say so."""
    wrong = request.routing_exception
    if isinstance(wrong, MethodNotAllowed) and wrong.valid_methods and (
            routes := current_app.create_url_adapter(request)) is not None:
        return str(routes.match(method=next(iter(wrong.valid_methods)))[0])
    return request.endpoint or ""


def require() -> None:
    """Before each request: finds the owner, or raises the problem `unauthorized`."""
    if not settings().api_tokens:
        g.owner = EVERYBODY
        return
    if is_open():
        return
    given = _auth.get_auth()  # not `login_required`, which lets every OPTIONS pass
    g.owner = _auth.authenticate(given, None) if given else None
    if not g.owner:
        _refuse()


def owner() -> str:
    """The owner that this request acts for."""
    return g.owner
