"""Verifying a callback as Standard Webhooks 1.0 asks, from the standard library alone."""
from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

TOLERANCE_SECONDS = 300  # how far the sender's clock, or a replayed request, may be off


def verify(headers: Mapping[str, str], body: bytes, secrets: Iterable[str], now: float) -> str | None:
    """None when one of the signatures was made with one of the secrets over exactly these bytes; else what is wrong.

    `headers` is looked up by lower-case names; `now` is in seconds since 1970.
    """
    webhook_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not webhook_id or not timestamp or "webhook-signature" not in headers:
        return "a webhook header is missing"
    if not timestamp.isascii() or not timestamp.isdigit():
        return "webhook-timestamp is no number"
    if abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return "webhook-timestamp is too far from the present"
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    wanted = [hmac.new(_key(secret), signed, hashlib.sha256).digest() for secret in secrets]
    given = [_decoded(part[3:]) for part in headers["webhook-signature"].split(" ") if part.startswith("v1,")]
    if any(hmac.compare_digest(one, other) for one in wanted for other in given):
        return None
    return "no signature matches"


def is_secret(secret: str) -> bool:
    """Whether a text is `whsec_` and base64."""
    return secret.startswith("whsec_") and bool(_decoded(secret.removeprefix("whsec_")))


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix("whsec_"))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
