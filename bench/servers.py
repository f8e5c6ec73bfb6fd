"""Which WSGI server: this application behind granian, gunicorn (gthread) and waitress, with 2 processes where it can
have them. `python -m bench.servers` prints a table: polls and submissions over 16 connections, then the polls again
while 20 clients hold half of a head and 20 hold half of a body open. It goes into docs/performance.md as well."""
from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import load, machine, report
from tests import servers
from tests.processes import Process, Site

_REPEATS = 3
_SECONDS = 2.0
_SLOW = 20  # clients of each sort
_APPLICATION = "app.api.__main__:application"
_GRANIAN = ("granian", "--interface", "wsgi", "--factory", "--http", "1", "--no-ws", "--workers", "2",
            "--respawn-failed-workers", "--port", "{port}", "--blocking-threads")
_GUNICORN = ("gunicorn", "--worker-class", "gthread", "--workers", "2", "--log-level", "error",
             "--bind", "127.0.0.1:{port}", "--threads")
SERVERS: dict[str, tuple[str, ...]] = {
    **{f"granian 2 x {threads}": (*_GRANIAN, str(threads), _APPLICATION) for threads in (1, 2, 4, 8, 16, 32)},
    **{f"gunicorn gthread 2 x {threads}": (*_GUNICORN, str(threads), f"{_APPLICATION}()") for threads in (4, 16, 32)},
    **{f"waitress 1 x {threads}": ("waitress", "--listen", "127.0.0.1:{port}", "--threads", str(threads), "--call",
                                   _APPLICATION) for threads in (8, 32)},
}
_COLUMNS = ("poll", "submit", "poll beside slow clients")


def main() -> None:
    """Prints the table, and writes it down."""
    runs: dict[str, list[dict[str, tuple[float, float] | None]]] = {name: [] for name in SERVERS}
    for _ in range(_REPEATS):
        for name, command in SERVERS.items():
            runs[name].append(_measured(command))
            print(name, runs[name][-1], file=sys.stderr, flush=True)
    text = f"{machine.told()} Medians of {_REPEATS} runs.\n\n{_table(runs)}"
    print(text)
    report.put(report.PAGE, "servers", text)


def _table(runs: Mapping[str, list[dict[str, tuple[float, float] | None]]]) -> str:
    lines = [f"| | {' | '.join(f'{column}, requests/s, p99 ms' for column in _COLUMNS)} |",
             "| --- " * (len(_COLUMNS) + 1) + "|"]
    for name, each in runs.items():
        lines.append(f"| {name} | {' | '.join(_cell([run[column] for run in each]) for column in _COLUMNS)} |")
    return "\n".join(lines)


def _cell(found: list[tuple[float, float] | None]) -> str:
    answered = [one for one in found if one is not None]
    if len(answered) < len(found):
        return "answers stay out"
    rate, p99 = (statistics.median(one[i] for one in answered) for i in (0, 1))
    return f"{rate:,.0f}, {p99:.1f}"


def _measured(command: tuple[str, ...]) -> dict[str, tuple[float, float] | None]:
    with tempfile.TemporaryDirectory() as folder, servers.valkey() as valkey:
        with Site(Path(folder), REDIS_URL=valkey.url) as site:
            argv = [sys.executable, "-m", *(word.format(port=site.port) for word in command)]
            server = Process("server", argv, site.env, Path(folder) / "server.log")
            site.running.append(server)  # whose end the site sees to
            site.wait_answering()
            job = f"/jobs/{site.submit(n=5)}"
            found = {"poll": _loaded("poll", site.port, job), "submit": _loaded("submit", site.port, "/jobs")}
            with _slow_clients(site.port):
                found["poll beside slow clients"] = _loaded("poll", site.port, job)
            return found


def _loaded(what: str, port: int, path: str) -> tuple[float, float] | None:
    """Requests a second and p99 in milliseconds; None when answers stayed out."""
    try:
        figures = load.apart(what, "--port", port, "--path", path, "--seconds", _SECONDS, "--patience", 5)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return None
    return figures["requests_per_second"], figures["p99_ms"]


@contextlib.contextmanager
def _slow_clients(port: int) -> Iterator[None]:
    """Halves of heads and of bodies, whose other halves never come."""
    head = b"POST /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body = head + b'Content-Length: 100\r\n\r\n{"n": '
    with contextlib.ExitStack() as stack:
        for text in [head] * _SLOW + [body] * _SLOW:
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            slow.sendall(text)
        yield


if __name__ == "__main__":
    main()
