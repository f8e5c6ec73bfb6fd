"""Verifying a callback as Standard Webhooks 1.0 asks, from the standard library alone."""
from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

TOLERANCE_SECONDS = 300  # how far the sender's clock, or a replayed request, may be off
_MAX_DIGITS = 15  # of a timestamp; int() refuses thousands of them in an error of its own


def verify(headers: Mapping[str, str], body: bytes, secrets: Iterable[str], now: float) -> str | None:
    """None when one of the signatures was made with one of the secrets over exactly these bytes; else what is wrong.

    `headers` is looked up by lower-case names; `now` is in seconds since 1970. What is no secret verifies nothing.
    """
    webhook_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not webhook_id or not timestamp or not headers.get("webhook-signature"):
        return "a webhook header is missing"
    if not webhook_id.isascii():
        return "webhook-id is not ASCII"
    if not timestamp.isascii() or not timestamp.isdigit() or len(timestamp) > _MAX_DIGITS:
        return "webhook-timestamp is no number of seconds"
    if abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return "webhook-timestamp is too far from the present"
    keys = [key for key in map(_key, secrets) if key]
    if not keys:
        return "no secret is known"
    return None if _matches(f"{webhook_id}.{timestamp}.".encode() + body, keys, headers["webhook-signature"]) \
        else "no signature matches"


def is_secret(secret: str) -> bool:
    """Whether a text is `whsec_` and the strict base64 of 24 to 64 bytes."""
    return bool(_key(secret))


def _matches(signed: bytes, keys: Iterable[bytes], signatures: str) -> bool:
    """Whether a `v1` signature among those, separated by spaces, was made with one of the keys; others are ignored."""
    given = [_decoded(part.removeprefix("v1,")) for part in signatures.split(" ") if part.startswith("v1,")]
    wanted = [hmac.new(key, signed, hashlib.sha256).digest() for key in keys]
    return any(hmac.compare_digest(one, other) for one in wanted for other in given)


def _key(secret: str) -> bytes:
    """Nothing for what is no secret: an empty key is one that everybody knows."""
    raw = _decoded(secret.removeprefix("whsec_"))
    return raw if secret.startswith("whsec_") and 24 <= len(raw) <= 64 else b""


def _decoded(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
    return decoded if base64.b64encode(decoded) == text.encode() else b""  # padding too much, or bits left over
