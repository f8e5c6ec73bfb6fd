"""hook.log: one line for each hook that came."""
from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from datetime import datetime, timezone
from pathlib import Path

_IDS_REMEMBERED = 100_000
_WEBHOOK_ID = re.compile(r"webhook_id=(\S+) signature=valid")


class Journal:
    """Appends to the log; knows the webhook ids that it has accepted, those of the file included."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as old:
                for line in old:
                    if match := _WEBHOOK_ID.search(line):
                        self._remember(match[1])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def accepted(self, job_id: str, status: str, webhook_id: str) -> None:
        """A hook whose signature holds."""
        with self._lock:
            again = " duplicate" if webhook_id in self._seen else ""
            self._remember(webhook_id)
            self._append(f"job_id={job_id} status={status} webhook_id={webhook_id} signature=valid{again}")

    def refused(self, webhook_id: str, why: str) -> None:
        """A hook whose signature does not hold."""
        with self._lock:
            self._append(f"webhook_id={webhook_id or '-'} signature=invalid ({why})")

    def _remember(self, webhook_id: str) -> None:
        self._seen[webhook_id] = None
        if len(self._seen) > _IDS_REMEMBERED:
            self._seen.popitem(last=False)

    def _append(self, text: str) -> None:
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        os.write(self._file, f"{at} {text}\n".encode())


def plain(value: object) -> str:
    """A value of a stranger's as one word of a line."""
    return re.sub(r"[^\x21-\x7e]", "?", str(value))[:100] or "-"
