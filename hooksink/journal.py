"""hook.log: one line for each hook that came."""
from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

MAX_BYTES = 10 * 1024 * 1024  # some 60,000 lines; then the file becomes hook.log.1, and the older one goes
IDS_REMEMBERED = 150_000  # more than two such files name
_MAX_WORD = 100
_WEBHOOK_ID = re.compile(rb"webhook_id=(\S+) signature=valid")


class Journal:
    """Appends whole lines to the log, also when other threads and processes do, and knows the webhook ids that were
    accepted: the log is the record, so what others wrote to it counts. Raises OSError when a line cannot be kept."""

    def __init__(self, path: Path) -> None:
        device = path.exists() and not path.is_file()
        self._path = path if device else Path(os.path.realpath(path))  # a link is not what is put aside
        self._older = self._path.with_name(self._path.name + ".1")
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._file, self._read_to = 0, 0  # which one was read last, and how far
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self._opened() as log:
            self._catch_up(log)

    def accepted(self, job_id: str, status: str, webhook_id: str) -> bool:
        """A hook whose signature holds. Returns whether its webhook id was accepted before."""
        name = word(webhook_id)
        with self._lock, self._opened() as log:
            self._catch_up(log)
            again = name.encode() in self._seen
            mark = " duplicate" if again else ""
            _append(log, f"job_id={word(job_id)} status={word(status)} webhook_id={name} signature=valid{mark}")
            self._remember(name.encode())
        return again

    def refused(self, webhook_id: str, why: str) -> None:
        """A hook whose signature does not hold."""
        with self._lock, self._opened() as log:
            _append(log, f"webhook_id={word(webhook_id)} signature=invalid ({why})")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The log, locked. It is opened each time: it may have been put aside, or its folder may be gone."""
        while True:
            log = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(log, fcntl.LOCK_EX)
                if self._is_current(log):
                    if not _is_full(log):
                        yield log
                        return
                    os.replace(self._path, self._older)
            finally:
                os.close(log)

    def _is_current(self, log: int) -> bool:
        try:
            return os.path.samestat(os.fstat(log), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _catch_up(self, log: int) -> None:
        """Reads what was written since the last time, by whomever."""
        now = os.fstat(log)
        if not stat.S_ISREG(now.st_mode):
            return
        if now.st_ino != self._file:
            self._file, self._read_to = now.st_ino, 0
            if self._older.is_file():
                with open(self._older, "rb") as older:
                    self._read(older.fileno(), 0)
        self._read_to = self._read(log, self._read_to)

    def _read(self, file: int, start: int) -> int:
        """Remembers the ids in the file from there on; returns its end. Of a file that is too long, the end counts."""
        end = os.fstat(file).st_size
        begin = max(0, end - 2 * MAX_BYTES, min(start, end))
        for match in _WEBHOOK_ID.finditer(os.pread(file, end - begin, begin)):
            self._remember(match[1])
        return end

    def _remember(self, webhook_id: bytes) -> None:
        self._seen[webhook_id] = None
        self._seen.move_to_end(webhook_id)
        if len(self._seen) > IDS_REMEMBERED:
            self._seen.popitem(last=False)


def moment() -> str:
    """Now, as the log writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def word(value: str) -> str:
    """A value of a stranger's as one word of a line; another value is another word."""
    plain = re.sub(r"[^\x21-\x7e]", "?", value[:_MAX_WORD])
    if plain == value:
        return plain or "-"
    return f"{plain[:_MAX_WORD - 17]}~{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _is_full(log: int) -> bool:
    now = os.fstat(log)
    return stat.S_ISREG(now.st_mode) and now.st_size >= MAX_BYTES


def _append(log: int, text: str) -> None:
    """The whole line or nothing of it."""
    line, size = f"{moment()} {text}\n".encode(), os.fstat(log).st_size
    if os.write(log, line) < len(line):
        os.ftruncate(log, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
