"""The hooks that this process has received, for a person to look at; hook.log is the record."""
from __future__ import annotations

import json
import threading
import unicodedata
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

KEPT = 200  # rows of the page
BODY_CHARACTERS = 4096  # of each body
_TEXT_CHARACTERS = 200  # of each other text
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


@dataclass(frozen=True)
class Hook:
    """One request as it is shown. `wrong` is why the signature does not hold, None when it does."""

    at: str
    path: str
    webhook_id: str
    job_id: str
    kind: str
    status: str
    wrong: str | None
    duplicate: bool
    answer: str
    body: str
    body_bytes: int
    cut: bool


class Received:
    """The latest hooks, and how many there were of each sort."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: deque[Hook] = deque(maxlen=KEPT)
        self._counts = Counter(received=0, valid=0, invalid=0, duplicates=0)

    def add(self, hook: Hook) -> None:
        """Counts and keeps it; the oldest goes."""
        with self._lock:
            self._hooks.appendleft(hook)
            self._counts.update(received=1, valid=hook.wrong is None, invalid=hook.wrong is not None,
                                duplicates=hook.duplicate)

    def latest(self) -> tuple[list[Hook], dict[str, int]]:
        """Newest first, and the counts."""
        with self._lock:
            return list(self._hooks), dict(self._counts)


def members(body: bytes) -> dict[str, Any]:
    """The members of a JSON object; none when it is no such thing."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def text_of(value: object) -> str:
    """A value of a stranger's, cut, on one line."""
    return visible(value[:_TEXT_CHARACTERS] + "…" * (len(value) > _TEXT_CHARACTERS)) if isinstance(value, str) else ""


def body_of(body: bytes) -> tuple[str, bool]:
    """A body as it came, but for what cannot be seen, and whether this is only its beginning."""
    start = body[:4 * BODY_CHARACTERS + 4].decode(errors="replace")
    shown = "\n".join(visible(line) for line in start[:BODY_CHARACTERS].split("\n"))
    return shown, len(start) > BODY_CHARACTERS


def visible(text: str) -> str:
    """Control and format characters as `\\u202e`: they hide, reverse and forge what stands around them."""
    return "".join(f"\\u{ord(one):04x}" if one != "\t" and unicodedata.category(one) in _INVISIBLE else one
                   for one in text)
