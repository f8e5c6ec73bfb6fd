"""HTTP as bytes on a socket, for what no client library would send."""
from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any, BinaryIO

JOB = b'{"n": 5}'
CHUNKED_JOB = b'8\r\n{"n": 5}\r\n0\r\n\r\n'


@dataclass(frozen=True)
class Said:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self, status: int, name: str) -> dict[str, Any]:
        """The problem that it must be."""
        assert (self.status, self.headers["content-type"]) == (status, "application/problem+json"), self
        document = json.loads(self.body)
        assert document["type"].endswith(f"/problems/{name}") and document["status"] == status, self
        return document


class _Kept:
    """A stream that several answers are read from: none of them closes it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def makefile(self, mode: str) -> _Kept:
        return self

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Wire:
    """A connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.stream = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        """Sends as much of it as the server wants to hear."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self, method: str = "GET") -> Said:
        """The next answer."""
        response = HTTPResponse(_Kept(self.stream), method=method)  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Said(response.status, headers, body)

    def is_over(self) -> bool:
        """Whether the server has closed it, and says nothing more. Waits for what is still to come."""
        with contextlib.suppress(ConnectionError):
            return self.stream.read(1) == b""
        return True


@contextlib.contextmanager
def wire(port: int) -> Iterator[Wire]:
    connection = Wire(port)
    try:
        yield connection
    finally:
        connection.stream.close()
        connection.socket.close()


def request(line: str, *headers: bytes, body: bytes = b"") -> bytes:
    """A request's bytes, with a Host, of JSON."""
    head = [line.encode() + b" HTTP/1.1", b"Host: h.example", b"Content-Type: application/json", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body
