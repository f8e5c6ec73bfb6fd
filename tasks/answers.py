"""Reading an answer's head more strictly than `http.client` does."""
from __future__ import annotations

import http.client
from typing import Any


class FinalAnswer(http.client.HTTPResponse):
    """The final answer (RFC 9110 15.2): interim ones before it are passed over, all of them and not 100 alone, so that
    the next request on the connection does not get this one's. A head that ends without its empty line is none
    (RFC 9112 8): raises IncompleteRead."""

    def begin(self) -> None:
        if self.headers is not None:
            return
        whole = self.fp
        self.fp = lines = _Lines(whole)
        try:
            super().begin()
        finally:
            if self.fp is lines:
                self.fp = whole
        if lines.last not in (b"\r\n", b"\n"):
            raise http.client.IncompleteRead(b"")

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 < status < 200:
                return version, status, reason
            if status == http.client.SWITCHING_PROTOCOLS:  # nobody asked for that
                raise http.client.UnknownProtocol(version)
            http.client.parse_headers(self.fp)


class _Lines:
    """Remembers the last line that was read."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.last = b""

    def readline(self, most: int) -> bytes:
        self.last = self.whole.readline(most)
        return self.last

    def close(self) -> None:
        self.whole.close()
