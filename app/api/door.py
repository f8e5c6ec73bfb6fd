"""The door for JSON: what comes in is one strict object, or nothing."""
from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from flask import current_app, request
from pydantic import ValidationError

from app import addresses, idempotency
from app.api.problems import Problem
from app.errors import EndpointRefused, Flaw, InvalidInput
from app.submissions import Key

MAX_BODY_BYTES = 1024 * 1024
MAX_DEPTH = 32
_CLOSE = {"Connection": "close"}
_READ_BYTES = 64 * 1024  # the largest body in sixteen reads
_PASSED_OVER_BYTES = 2 * MAX_BODY_BYTES  # read to its end, so that a proxy which is still sending gets the answer
_PLACE_SECONDS = 0.25  # a body that is there is read in less than a millisecond
_MAX_DIGITS = 1000
# A text is passed over whole, an unended one too: linear in the length of whatever was sent.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+;=%:\[\]-]*")
_BARE_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED_KEY = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')  # RFC 9651 3.3.3


def refuse_ambiguous(environ: dict[str, Any]) -> None:
    """Before each request: what two readers could understand in two ways is refused (RFC 9112 3.2, 6.1). Raises Problem
    `bad-request`."""
    if environ.get("HTTP_TRANSFER_ENCODING", "chunked").strip().lower() != "chunked":
        raise Problem("bad-request", "Transfer-Encoding may be chunked, once, and nothing else", headers=_CLOSE)
    host = environ.get("HTTP_HOST", "")
    if not _HOST.fullmatch(host) or (not host and environ["SERVER_PROTOCOL"] == "HTTP/1.1"):
        raise Problem("bad-request", "one Host header with a host in it is needed", headers=_CLOSE)


def read_object() -> dict[str, Any]:
    """The request's body as a JSON object. Raises Problem: `not-json`, `too-large`, `malformed-json`; and InvalidInput
    for JSON that is no object."""
    environ = request.environ
    if environ.get("HTTP_CONTENT_ENCODING", "identity").lower() != "identity":
        raise Problem("not-json", "a compressed body is not taken")
    if environ.get("CONTENT_TYPE") != "application/json" and request.mimetype != "application/json":
        raise Problem("not-json", f"Content-Type is {request.mimetype or 'missing'!r}, application/json is needed")
    value = _parse(_read())
    if not isinstance(value, dict):
        raise InvalidInput([Flaw("#", "must be an object")])
    return value


def _read() -> bytes:
    """The body, of at most MAX_BODY_BYTES whether its length was told or not (werkzeug's own limit would cut a chunked
    one silently)."""
    told = request.content_length or 0
    if told > _PASSED_OVER_BYTES:
        raise _too_large()
    read, size = [], 0
    with _a_place():
        if told > MAX_BODY_BYTES:
            while request.stream.read(_READ_BYTES):
                pass
            raise _too_large()
        while chunk := request.stream.read(min(_READ_BYTES, MAX_BODY_BYTES + 1 - size)):
            read.append(chunk)
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            if size == told:
                break
    if size < told:
        raise Problem("malformed-json", f"the body ended after {size} of {told} bytes")
    return b"".join(read)


def _too_large() -> Problem:
    return Problem("too-large", f"the body has more than {MAX_BODY_BYTES} bytes", headers=_CLOSE)


@contextlib.contextmanager
def _a_place() -> Iterator[None]:
    """A body that trickles in holds the thread that reads it: three in four of WEB_THREADS may, so that the others go
    on answering whoever only asks. Raises Problem `busy`."""
    places: threading.Semaphore = current_app.extensions["uketsuke_places"]
    if not places.acquire(timeout=_PLACE_SECONDS):
        raise Problem("busy", "too many bodies are on their way", headers=_CLOSE)
    try:
        yield
    finally:
        places.release()


def _parse(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
        _refuse_depth(text)
        value = json.loads(
            text, object_pairs_hook=_members, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
        _refuse_texts(value)
        return value
    except UnicodeDecodeError as error:
        raise Problem("malformed-json", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Problem("malformed-json", f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        raise Problem("malformed-json", str(error)[:200]) from None


def _refuse_depth(text: str) -> None:
    depth = 0
    for token in _BRACKETS.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
            case "]" | "}":
                depth -= 1


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member is there twice")
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number is too long")
    return int(text)


def _finite(text: str) -> float | int:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    # JSON has one sort of number (RFC 8785 3.2.2.3): 5.0 is 5, and an integer where one is asked for.
    return int(number) if number.is_integer() and abs(number) <= 2**53 else number


def _refuse_texts(value: Any) -> None:
    """Refuses, in values and names alike, what a database cannot keep."""
    match value:
        case str():
            if "\x00" in value:
                raise ValueError("a text holds NUL")
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("a text holds half of a surrogate pair") from None
        case dict():
            for name, member in value.items():
                _refuse_texts(name)
                _refuse_texts(member)
        case list():
            for member in value:
                _refuse_texts(member)


def key_of(body: dict[str, Any]) -> Key | None:
    """The request's Idempotency-Key, with the fingerprint of the request that it stands for. Raises Problem
    `bad-idempotency-key`."""
    text = _key_text()
    if text is None:
        return None
    asked = {name: member for name, member in body.items() if name != "callback_url" or member is not None}
    return Key(text, idempotency.fingerprint(request.method, str(request.url_rule), asked))


def _key_text() -> str | None:
    """The key, without the quotes of a structured-field string."""
    given = request.headers.get("Idempotency-Key")
    if given is None:
        return None
    text = given.strip(" \t")
    quoted = _QUOTED_KEY.fullmatch(text)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else text
    if not _BARE_KEY.fullmatch(key) or (text.startswith('"') and not quoted):
        raise Problem("bad-idempotency-key", "1 to 255 printable ASCII characters are needed")
    return key


def callback_url(members: dict[str, Any]) -> str | None:
    """Takes `callback_url` out of the members. Raises InvalidInput when it cannot be called."""
    url = members.pop("callback_url", None)
    if url is None:
        return None
    try:
        if not isinstance(url, str):
            raise EndpointRefused("must be a text")
        addresses.check(url)
    except EndpointRefused as refusal:
        raise InvalidInput([Flaw("#/callback_url", str(refusal))]) from None
    return url


def flaws(error: ValidationError) -> InvalidInput:
    """What pydantic found, each with its place in the body."""
    return InvalidInput([Flaw(pointer(flaw["loc"]), flaw["msg"]) for flaw in error.errors(
        include_url=False, include_context=False, include_input=False)])


def pointer(place: tuple[int | str, ...]) -> str:
    """A place in a document, as a URI fragment (RFC 6901 6)."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in place)
    return "#" + "".join("/" + quote(step, safe="!$&'()*+,;=:@?") for step in escaped)
