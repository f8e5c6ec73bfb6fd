"""A callback receiver below HTTP libraries: keeps the very bytes of each request, up to the end of its connection."""
from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.servers import wait_until


@dataclass(frozen=True)
class Request:
    """What came on one connection: the head without the empty line that ends it, and everything after that line."""

    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case names; no name comes twice."""
        pairs = [line.split(b": ", 1) for line in self.head.split(b"\r\n")[1:]]
        found = {name.decode("ascii").lower(): value.decode("ascii") for name, value in pairs}
        assert len(found) == len(pairs)
        return found


@dataclass
class Rawsink:
    """Answers with each of `codes` in turn, and with 204 after them."""

    url: str
    codes: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def came(self, number: int) -> list[Request]:
        """All requests, once there are so many: one is complete only when its connection has ended."""
        wait_until(lambda: len(self.requests) >= number, what=f"{number} requests")
        return list(self.requests)


@contextlib.contextmanager
def rawsink() -> Iterator[Rawsink]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = Rawsink(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread = threading.Thread(target=_serve, args=(listening, sink), daemon=True)
        thread.start()
        try:
            yield sink
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listening: socket.socket, sink: Rawsink) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(20)
            sink.requests.append(_take(connection, sink.codes.pop(0) if sink.codes else 204))


def _take(connection: socket.socket, code: int) -> Request:
    """Answers when the promised length is there, then reads on until nothing more comes."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += _more(connection)
    request = Request(*came.split(b"\r\n\r\n", 1))
    missing = int(request.headers["content-length"]) - len(request.body)
    while missing > 0:
        part = _more(connection)
        came, missing = came + part, missing - len(part)
    connection.sendall(f"HTTP/1.1 {code} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    connection.shutdown(socket.SHUT_WR)
    while part := connection.recv(65536):
        came += part
    return Request(*came.split(b"\r\n\r\n", 1))


def _more(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    assert part, "the connection ended in mid-request"
    return part
