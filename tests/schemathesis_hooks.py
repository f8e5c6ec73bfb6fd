"""What the generated requests may not ask for, loaded by schemathesis (tests/test_schemathesis.py)."""
from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import schemathesis

from app.api.operations import bodies
from app.api.operations.jobs import IDEMPOTENCY_KEY

_URL = bodies.CALLBACK_URL["anyOf"][0]
_KEY = re.compile(IDEMPOTENCY_KEY.param_schema.pattern)
_LARGEST_N = 10**6  # a count up to 10**9 is as valid, and takes a worker seconds


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Keeps what is valid valid, and what is not as it is.

    Which callback address may be called hangs on the network, and whether a key is free on the requests before: no
    schema can say either. So a valid address becomes the one that CALLBACK_ALLOW opens, and a valid key names its
    request: the same again is a replay. A large count becomes a smaller one.
    """
    if isinstance(case.body, dict):
        _change_body(case.body)
    key = (case.headers or {}).get("Idempotency-Key")
    if isinstance(key, str) and _KEY.search(key):
        case.headers["Idempotency-Key"] = _own(key, case.operation.label + repr(case.body))


def _change_body(body: dict[str, Any]) -> None:
    url, n = body.get("callback_url"), body.get("n")
    if isinstance(url, str) and len(url) <= _URL["maxLength"] and re.search(_URL["pattern"], url):
        body["callback_url"] = os.environ["CALLBACK"]
    if isinstance(n, int) and not isinstance(n, bool) and _LARGEST_N < n <= 10**9:
        body["n"] = _LARGEST_N


def _own(key: str, request: str) -> str:
    """The key with a name of the request in it, bare or quoted as it was."""
    name = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    inner = key.strip('"')
    kept = inner if len(inner) < 200 and "\\" not in inner else "x"
    return f'"{kept}{name}"' if key.startswith('"') else f"{kept}{name}"
