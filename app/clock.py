"""The time: always UTC, always aware."""
from __future__ import annotations

from datetime import datetime, timezone


def now() -> datetime:
    """The present moment in UTC."""
    return datetime.now(timezone.utc)


def isoformat(moment: datetime) -> str:
    """A moment as clients read it: RFC 3339 in UTC with milliseconds, `2026-11-29T18:40:00.123Z`."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
