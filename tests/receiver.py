"""A callback receiver inside the test process: answers as it is told and keeps what came."""
from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Hook:
    path: str
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.time)


@dataclass
class Receiver:
    """`respond` gets the request handler and writes the answer; by default 204."""

    url: str = ""
    port: int = 0
    hooks: list[Hook] = field(default_factory=list)
    respond: Callable[[http.server.BaseHTTPRequestHandler, int], None] | None = None


def status(code: int, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler, int], None]:
    """Answers with this status and these headers."""

    def respond(handler: http.server.BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return respond


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    told = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.hook = Hook(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            told.hooks.append(self.hook)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                (told.respond or status(204))(self, len(told.hooks))

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    told.port = server.server_address[1]
    told.url = f"http://127.0.0.1:{told.port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
