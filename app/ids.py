"""Names for rows that clients see."""
from __future__ import annotations

import re
import secrets
from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID = re.compile(PATTERN)


def new_id(now: datetime) -> str:
    """A UUID of version 7 (RFC 9562 5.7): sorts by this moment, to the millisecond, and its 74 random bits cannot be
    guessed.

    Own code because the standard library has it only since 3.14, and the libraries' counters make ids of one
    millisecond follow each other.
    """
    milliseconds = (now - _EPOCH) // _MILLISECOND
    bits = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    digits = f"{bits:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def moment_of(made: str) -> datetime:
    """The moment that `new_id` made this id for, to the millisecond."""
    return _EPOCH + int(made[:8] + made[9:13], 16) * _MILLISECOND


def is_id(text: str) -> bool:
    """Whether the text has the one spelling that `new_id` writes."""
    return _UUID.fullmatch(text) is not None
