"""Standard Webhooks 1.0 (https://www.standardwebhooks.com): the headers that prove where a callback comes from."""
from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence
from datetime import datetime


def headers(webhook_id: str, now: datetime, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """`webhook-id`, `webhook-timestamp` and `webhook-signature` of these bytes, sent now; one signature for each
    secret, in their order, so that a receiver may know any of them while a secret is changed."""
    timestamp = str(int(now.timestamp()))
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(_sign(secret, signed) for secret in secrets),
    }


def _sign(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
