"""A callback receiver that is no bottleneck: one process, one thread, epoll, connections kept, 204 to everything.

`python -m bench.receiving` prints its port. `GET /` tells how many hooks have come, and when the first and the last;
`GET /forget` begins anew.
"""
from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import ProxyHandler, build_opener

from tests.servers import wait_until

_ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"
_CHUNK_BYTES = 262_144


@dataclass
class Seen:
    """What has come: how many hooks, and when the first and the last (`time.time`)."""

    hooks: int = 0
    first: float = 0.0
    last: float = 0.0


class Door:
    """A receiver that runs beside."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._opener = build_opener(ProxyHandler({}))

    def seen(self) -> Seen:
        with self._opener.open(self.url, timeout=30) as answer:
            return Seen(**json.load(answer))

    def forget(self) -> None:
        self._opener.open(f"{self.url}/forget", timeout=30).close()

    def wait(self, hooks: int, seconds: float) -> float:
        """Waits until so many have come; returns the seconds between the first and the last."""
        wait_until(lambda: self.seen().hooks >= hooks, seconds, f"{hooks} hooks")
        seen = self.seen()
        return seen.last - seen.first


@contextlib.contextmanager
def receiver() -> Iterator[Door]:
    """One in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "bench.receiving"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Door(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def _answers(taken: bytearray, seen: Seen) -> bytes:
    """The answers to the whole requests at the beginning, which are taken away."""
    said = b""
    while (head := taken.find(b"\r\n\r\n")) >= 0:
        if taken.startswith(b"GET"):
            if taken.startswith(b"GET /forget"):
                seen.hooks, seen.first, seen.last = 0, 0.0, 0.0
            told = json.dumps(vars(seen)).encode()
            said += b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told)
            del taken[:head + 4]
            continue
        at = taken.lower().find(b"content-length:", 0, head) + 15
        whole = head + 4 + int(taken[at:taken.find(b"\r\n", at)])
        if len(taken) < whole:
            break
        del taken[:whole]
        said += _ACCEPTED
        seen.hooks, seen.last = seen.hooks + 1, time.time()
        seen.first = seen.first or seen.last
    return said


def main() -> None:
    """Receives until it is killed."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listening.getsockname()[1], flush=True)
    poll, seen = select.epoll(), Seen()
    poll.register(listening, select.EPOLLIN)
    open_now: dict[int, tuple[socket.socket, bytearray]] = {}
    while True:
        for number, _ in poll.poll():
            if number == listening.fileno():
                came, _ = listening.accept()
                came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                open_now[came.fileno()] = came, bytearray()
                poll.register(came, select.EPOLLIN)
                continue
            came, taken = open_now[number]
            with contextlib.suppress(OSError):
                if chunk := came.recv(_CHUNK_BYTES):
                    taken += chunk
                    if said := _answers(taken, seen):
                        came.sendall(said)
                    continue
            del open_now[number]
            came.close()


if __name__ == "__main__":
    main()
