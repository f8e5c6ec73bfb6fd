"""Standard Webhooks 1.0: the headers that prove where a callback comes from."""
from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from standardwebhooks import Webhook


def headers(webhook_id: str, now: datetime, body: str, secrets: Sequence[str]) -> dict[str, str]:
    """`webhook-id`, `webhook-timestamp` and `webhook-signature` of this body, sent now as UTF-8; one signature for
    each secret, so that a receiver may know either while a secret is changed."""
    moment = now.astimezone(timezone.utc)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(webhook_id, moment, body) for secret in secrets),
    }
