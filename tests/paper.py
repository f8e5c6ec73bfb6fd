"""docs/api.md as tests use it: its lines, its programs and tables; and a relay to stand between its client and us. The
blocks and tables of another paper, too."""
from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import requests

from tests.processes import ROOT

TEXT = (ROOT / "docs" / "api.md").read_text()
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
ETAG = r'"[0-9a-f]{32}"'


def blocks(language: str, text: str = TEXT) -> list[str]:
    """What stands between fences of this language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def lines() -> list[tuple[str, str]]:
    """Each command with the answer below it."""
    return [(line, answer) for block in blocks("console") for line, answer in re.findall(
        r"(?m)^\$ (.*)\n((?:(?!\$ ).*\n)*)", block)]


def masked(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(ETAG, '"ETAG"', re.sub(UUID, "ID", text.replace("\r", "")))
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "MOMENT", text)
    text = re.sub(r'("duration_seconds": )[\d.]+', r"\1SECONDS", text)
    return re.sub(r"(?m)^(date|sunset|retry-after): .*$", r"\1: LATER", text).strip()


def table(heading: str, text: str = TEXT) -> dict[str, list[str]]:
    """The table whose first column is headed so: the other columns by the first one."""
    rows = text.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]
    return {first.strip("`"): rest for first, *rest in cells}


class Client:
    """The paper's client, whose requests and pauses are written down; `meanwhile` is called for each pause."""

    def __init__(self, meanwhile: Callable[[int], Any]) -> None:
        self.meanwhile = meanwhile
        self.log: list[tuple[str, int]] = []  # what was asked with what status, and pauses with their seconds
        self.waits: list[int] = []  # of each answer: its Retry-After, 0 without
        self.paused: list[int] = []  # after each answer
        names: dict[str, Any] = {"__name__": "client"}
        exec(compile(blocks("python")[0], "docs/api.md", "exec"), names)
        names["time"] = SimpleNamespace(sleep=self._pause)
        self.session: requests.Session = names["session"]
        self.session.trust_env = False
        self._request = self.session.request
        self.session.request = self._watched  # type: ignore[method-assign]
        self.result_of = names["result_of"]

    def _watched(self, method: str, url: str, **more: Any) -> requests.Response:
        self.waits.append(0)
        self.paused.append(0)
        self.log.append((method, 0))
        answer = self._request(method, url, **more)
        self.log[-1] = (method, answer.status_code)
        self.waits[-1] = int(answer.headers.get("Retry-After", 0))
        return answer

    def _pause(self, seconds: int) -> None:
        self.log.append(("pause", seconds))
        self.paused[-1] += seconds
        assert len(self.log) < 100, "it goes on for ever"
        self.meanwhile(seconds)

    def asked(self) -> list[tuple[str, int]]:
        """The log without its pauses."""
        return [(what, status) for what, status in self.log if what != "pause"]

    def was_polite(self) -> bool:
        """Whether it never asked again before the time that an answer had named."""
        return all(paused >= wait for paused, wait in list(zip(self.paused, self.waits))[:-1])


@contextlib.contextmanager
def relay(api: str, prefix: str, lose: Callable[[Callable[[], object]], None]) -> Iterator[str]:
    """A proxy before this API, under a prefix. The first POST is given to `lose` as a function that forwards it, and
    gets no answer."""
    posts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def forward(self) -> requests.Response:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {**self.headers, "X-Forwarded-Prefix": prefix}
            path = self.path.removeprefix(prefix)
            with requests.Session() as session:
                session.trust_env = False
                return session.request(self.command, api + path, data=body, headers=headers, timeout=30)

        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            with contextlib.suppress(requests.ConnectionError):
                answer = self.forward()
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.content)

        def do_POST(self) -> None:
            posts.append(self.path)
            if len(posts) == 1:
                lose(self.forward)
            else:
                self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
