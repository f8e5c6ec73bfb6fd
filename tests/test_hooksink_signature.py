"""What hooksink takes for a signature, held against the specification's vector and its own library."""
from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from standardwebhooks import Webhook

from app import config
from hooksink import signature

SECRET, OTHER = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + "A" * 32
ID, NOW, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
PUBLISHED = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def verify(given: str = PUBLISHED, *secrets: str, now: float = NOW, body: bytes = BODY, **more: str) -> str | None:
    headers = {"webhook-id": ID, "webhook-timestamp": str(NOW), "webhook-signature": given}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return signature.verify(headers, body, secrets or (SECRET,), now)


def test_the_published_vector_holds() -> None:
    assert verify() is None
    for byte in range(len(BODY)):
        assert verify(body=BODY[:byte] + b"~" + BODY[byte + 1:]) == "no signature matches"
    assert verify(webhook_id=ID + "x") == verify(webhook_timestamp=str(NOW + 1)) == "no signature matches"


@pytest.mark.parametrize("body", ["", "{}", '{"é": "😀\u2028", "float": 1.0}', "x" * 100_000])
def test_what_the_specifications_library_signs_holds(body: str) -> None:
    signed = Webhook(OTHER).sign(ID, datetime.fromtimestamp(NOW, timezone.utc), body)
    assert verify(signed, OTHER, body=body.encode()) is None
    assert verify(signed, SECRET, OTHER, body=body.encode()) is None
    assert verify(signed, SECRET, body=body.encode()) == "no signature matches"


@pytest.mark.parametrize("given,holds", [
    (f"v1,AAAA {PUBLISHED}", True), (f"{PUBLISHED} v1a,AAAA v2,x", True), (f"  {PUBLISHED} ", True),
    (f"v1,é {PUBLISHED}", True), (f"v1 v1, , {PUBLISHED}", True), (PUBLISHED.replace("v1", "v1a"), False),
    (PUBLISHED.replace("v1", "V1"), False), (PUBLISHED.replace("v1,", ""), False), (PUBLISHED[:-1], False),
    (PUBLISHED + "=", False), (PUBLISHED.replace("+", "-").replace("/", "_"), False), (PUBLISHED + "AAAA", False),
    (PUBLISHED[:20] + "!" + PUBLISHED[20:], False), ("v1,", False), ("v1,é", False), (f"v1,{PUBLISHED}", False),
])
def test_one_of_several_signatures_is_enough_and_others_are_passed_over(given: str, holds: bool) -> None:
    assert verify(given) == (None if holds else "no signature matches")


@pytest.mark.parametrize("off,holds", [(0, True), (300, True), (-300, True), (300.5, False), (-300.5, False)])
def test_the_replay_window_is_five_minutes_either_way(off: float, holds: bool) -> None:
    assert verify(now=NOW + off) == (None if holds else "webhook-timestamp is too far from the present")


@pytest.mark.parametrize("more", [
    {"webhook_id": ""}, {"webhook_timestamp": ""}, {"webhook_signature": ""}, {"webhook_id": "é"},
    *({"webhook_timestamp": text} for text in (
        "x", "-1", "+1614265330", "1614265330.0", " 1614265330", "1e9", "١٦١٤٢٦٥٣٣٠", "²", "9" * 15, "1" * 5000)),
])
def test_headers_that_are_none_are_refused(more: dict[str, str]) -> None:
    assert "webhook" in str(verify(**more))


@pytest.mark.parametrize("known", [(), ("",), ("whsec_",), ("whsec_!",), ("whsec_" + "A" * 28,)])
def test_what_is_no_secret_verifies_nothing(known: tuple[str, ...]) -> None:
    """An empty key would be one that everybody knows."""
    keys = [b""] + [base64.b64decode(text.removeprefix("whsec_").replace("!", "")) for text in known]
    for key in keys:
        mac = hmac.new(key, f"{ID}.{NOW}.".encode() + BODY, hashlib.sha256).digest()
        headers = {"webhook-id": ID, "webhook-timestamp": str(NOW),
                   "webhook-signature": "v1," + base64.b64encode(mac).decode()}
        assert signature.verify(headers, BODY, known, NOW) == "no secret is known"


def _refuses(check: Callable[[str], None], secret: str) -> bool:
    try:
        check(secret)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("secret", [
    SECRET, OTHER, "whsec_", "", SECRET[6:], "WHSEC_" + SECRET[6:], SECRET[:-1], SECRET + "=", SECRET + "\n",
    SECRET + "é", SECRET.replace("r", "-"), SECRET.replace("r", " "),
    *("whsec_" + base64.b64encode(b"k" * size).decode() for size in (1, 23, 24, 25, 64, 65, 100)),
])
def test_the_same_texts_are_secrets_as_for_the_service(secret: str) -> None:
    assert signature.is_secret(secret) is not _refuses(config.check_secret, secret)
