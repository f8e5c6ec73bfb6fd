"""A load that costs little, in a process of its own: `python -m bench.load submit|poll|react ...` prints JSON.

Keep-alive connections on non-blocking sockets and one selector, each with one request under way at a time. Every answer
must have the expected status. Times are those of the monotonic clock, which all processes of a machine share.
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_HEAD = b"Host: 127.0.0.1\r\nAccept: */*\r\n"
_WARM_UP_SECONDS = 0.3  # of a load by time, not counted: connections, first statements, pools
_PATIENCE_SECONDS = 30.0  # without any answer
TOLD = 10


class Connection:
    """One connection, and what has come of the answer to its request."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.began = 0.0

    def send(self, request: bytes) -> None:
        """A request is small: the kernel takes it at once."""
        self.received = b""
        self.began = time.perf_counter()
        if self.socket.send(request) != len(request):
            raise RuntimeError("the kernel took only a part of a request")

    def answer(self) -> tuple[int, bytes] | None:
        """Status and body, once there is all of it."""
        part = self.socket.recv(65536)
        if not part:
            raise RuntimeError(f"closed by the server after {self.received!r}")
        self.received = self.received + part if self.received else part
        head = self.received.find(b"\r\n\r\n")
        if head < 0:
            return None
        body = head + 4
        if len(self.received) < body + _content_length(self.received[:head]):
            return None
        return int(self.received[9:12]), self.received[body:]


def _content_length(head: bytes) -> int:
    low = head.lower()
    at = low.index(b"content-length:") + 15
    end = low.find(b"\r\n", at)
    return int(low[at:] if end < 0 else low[at:end])


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), _HEAD)


def post(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(), _HEAD, len(body), body)


def submissions(path: str, told: str | None = None) -> Iterator[bytes]:
    """Requests that differ: jobs with small numbers, one of TOLD with a callback to the URL `told`, or notes with texts
    of their own."""
    for number in itertools.count():
        body: dict[str, Any] = {"text": f"note {number}"} if path == "/notes" else {"n": number % 97}
        if told is not None and number % TOLD == 0:
            body["callback_url"] = told
        yield post(path, json.dumps(body).encode())


def drive(given: argparse.Namespace, requests: Iterator[bytes], expected: int) -> dict[str, float]:
    """So many requests, or for so many seconds; returns the rate and the latencies."""
    seconds = given.seconds
    opened = [Connection(given.port) for _ in range(given.connections)]
    prebuilt = list(itertools.islice(requests, given.count if seconds is None else 4096))
    request = iter(prebuilt) if seconds is None else itertools.cycle(prebuilt)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for each in opened:
            stack.callback(each.socket.close)
            each.socket.setblocking(False)
            selector.register(each.socket, selectors.EVENT_READ, each)
        return _figures(*_drive(selector, opened, request, expected, seconds, given.patience))


def _drive(
    selector: selectors.BaseSelector, opened: list[Connection], request: Iterator[bytes], expected: int,
    seconds: float | None, patience: float,
) -> tuple[list[tuple[float, float]], float, float, int]:
    """When each answer came and how long it took, of those that count; for how many seconds they count; when the first
    request left; how many answers there were in all."""
    first, began = time.monotonic(), time.perf_counter()
    counted = began if seconds is None else began + _WARM_UP_SECONDS
    until = float("inf") if seconds is None else counted + seconds
    took: list[tuple[float, float]] = []
    busy = _begin(opened, request)
    while busy:
        for connection in _ready(selector, patience):
            if (answer := connection.answer()) is None:
                continue
            now = time.perf_counter()
            _check(answer, expected)
            took.append((now, now - connection.began))
            following = next(request, None) if now < until else None
            if following is None:
                selector.unregister(connection.socket)  # the server may close it from now on
                busy -= 1
            else:
                connection.send(following)
    inside = [one for one in took if counted <= one[0] <= until]
    return inside, seconds or took[-1][0] - counted, first, len(took)


def _ready(selector: selectors.BaseSelector, patience: float) -> list[Connection]:
    if not (ready := selector.select(patience)):
        raise RuntimeError(f"no answer within {patience:g} s")
    return [key.data for key, _ in ready]


def _check(answer: tuple[int, bytes], expected: int) -> None:
    if answer[0] != expected:
        raise RuntimeError(f"{answer[0]} instead of {expected}: {answer[1][:400]!r}")


def _begin(opened: list[Connection], request: Iterator[bytes]) -> int:
    begun = 0
    for connection, first in zip(opened, request):
        connection.send(first)
        begun += 1
    return begun


def _figures(took: list[tuple[float, float]], seconds: float, began: float, answered: int) -> dict[str, float]:
    ordered = sorted(one[1] for one in took)
    return {"requests_per_second": len(ordered) / seconds, **latencies(ordered), "answered": answered, "began": began}


def latencies(ordered: list[float]) -> dict[str, float]:
    """Of seconds in ascending order: the median, the 99th percentile and the longest, in milliseconds."""
    return {"p50_ms": ordered[len(ordered) // 2] * 1000, "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
            "max_ms": ordered[-1] * 1000}


def react(port: int, path: str, count: int) -> dict[str, float]:
    """One job at a time: from before its POST until a client that polls without pause sees its result."""
    connection = Connection(port)
    with contextlib.closing(connection.socket):
        took = []
        for request in itertools.islice(submissions(path), count):
            began = time.perf_counter()
            job_id = json.loads(ask(connection, request, 202))["job_id"]
            _until_final(connection, get(f"/jobs/{job_id}"), began + _PATIENCE_SECONDS)
            took.append(time.perf_counter() - began)
    return {**latencies(sorted(took)), "answered": count}


def _until_final(connection: Connection, request: bytes, deadline: float) -> None:
    while b'"result"' not in (body := ask(connection, request, 200)):
        if time.perf_counter() > deadline:
            raise RuntimeError(f"not final: {body!r}")


def ask(connection: Connection, request: bytes, expected: int) -> bytes:
    """One request, and the body of its answer, which is waited for without pause."""
    connection.send(request)
    while (answer := connection.answer()) is None:
        pass
    _check(answer, expected)
    return answer[1]


def submit(port: int, path: str, count: int, told: str | None = None) -> None:
    """So many submissions, from this process."""
    given = argparse.Namespace(port=port, connections=16, seconds=None, count=count, patience=_PATIENCE_SECONDS)
    drive(given, submissions(path, told), 202)


def apart(*arguments: Any) -> dict[str, float]:
    """This load, in a process of its own. Raises RuntimeError with what it says."""
    argv = [sys.executable, "-m", "bench.load", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:])
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load")
    parser.add_argument("what", choices=("submit", "poll", "react"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/jobs")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--patience", type=float, default=_PATIENCE_SECONDS)
    given = parser.parse_args()
    loads: dict[str, Callable[[], dict[str, float]]] = {
        "submit": lambda: drive(given, submissions(given.path), 202),
        "poll": lambda: drive(given, itertools.repeat(get(given.path)), 200),
        "react": lambda: react(given.port, given.path, given.count),
    }
    try:
        print(json.dumps(loads[given.what]()))
    except (RuntimeError, OSError) as error:
        sys.exit(f"{given.what} {given.path}: {error}")


if __name__ == "__main__":
    main()
