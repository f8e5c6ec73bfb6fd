"""Who may: bearer tokens (RFC 6750) from API_TOKENS; without any, everybody is the same owner."""
from __future__ import annotations

import hmac
from typing import Any

from flask import g, request
from flask_httpauth import HTTPTokenAuth

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


def is_open(endpoint: str | None) -> bool:
    """Whether everybody may ask it, with a token or without."""
    return (endpoint or "").startswith(_OPEN_ENDPOINTS)


def require() -> Any:
    """Before each request: finds the owner, or raises the problem `unauthorized`."""
    if not settings().api_tokens:
        g.owner = EVERYBODY
        return None
    if is_open(request.endpoint):
        return None
    g.owner = _auth.login_required(lambda: _auth.current_user())()
    return None


def owner() -> str:
    """The owner that this request acts for."""
    return g.owner
