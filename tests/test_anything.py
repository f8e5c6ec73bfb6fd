"""Whatever comes in: never a 5xx, never HTML, nothing kept of what was refused, and both databases answer alike."""
from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from app import addresses
from app.api import polling
from tests import conftest, servers, strategies
from tests.processes import Site
from tests.twins import SETTINGS, Call, Twins


@pytest.fixture
def twins(
    request: pytest.FixtureRequest, tmp_path: Path, valkey: servers.Valkey, templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Twins]:
    """A SQLite and a PostgreSQL database behind one application."""
    postgres: servers.Postgres = request.getfixturevalue("postgres")
    urls = conftest._sqlite(request, tmp_path, templates), conftest._postgresql(request, templates)
    settings = {**SETTINGS, "REDIS_URL": valkey.url, "VAR_DIR": str(tmp_path / "var"), "DATABASE_URL": urls[0],
                "TRUSTED_PROXIES": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(polling, "MAX_WAIT_SECONDS", 0)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", _numeric_only)
    made = Twins(*urls)
    try:
        yield made
    finally:
        made.dispose()
        postgres.drop(urls[1])
        conftest.forget_settings()


_look_up = socket.getaddrinfo


def _numeric_only(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
    """No name is asked of anybody."""
    return _look_up(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)


def outcomes(twins: Twins, calls: st.SearchStrategy[Call], few: int) -> Counter[int | str]:
    """Checks so many of these calls, and counts statuses and problems."""
    seen: Counter[int | str] = Counter()

    @strategies.examples(few)
    @given(calls)
    def each(call: Call) -> None:
        note(repr(call))
        answer = twins.check(call)
        seen[answer.status] += 1
        if answer.problem:
            seen[answer.problem] += 1

    each()
    print(seen)
    return seen


def test_anything_as_a_body(twins: Twins) -> None:
    seen = outcomes(twins, strategies.submissions(), 150)
    assert seen[202] and seen["malformed-json"] and seen["invalid-input"]


def test_any_text_that_a_database_would_keep(twins: Twins) -> None:
    seen = outcomes(twins, strategies.texts_to_keep, 80)
    assert seen[202] and seen["malformed-json"]


def test_anything_in_the_headers(twins: Twins) -> None:
    seen = outcomes(twins, strategies.odd_headers(), 200)
    assert {200, 202, "not-json", "unauthorized"} <= seen.keys()


def test_any_address_and_method(twins: Twins) -> None:
    seen = outcomes(twins, strategies.addresses, 200)
    assert {200, "not-found", "method-not-allowed", "invalid-input"} <= seen.keys()


def test_anything_in_every_place(twins: Twins) -> None:
    seen = outcomes(twins, strategies.anything, 100)
    assert {"not-found", "method-not-allowed", "unauthorized"} <= seen.keys()


# --- any bytes to a real server ---


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_any_bytes_to_the_server_are_answered_or_end_the_connection(site: Site) -> None:
    web = site.start_alone("web")
    site.wait_answering()
    seen: Counter[int] = Counter()

    @strategies.examples(50)
    @given(strategies.raw_requests())
    def each(sent: bytes) -> None:
        note(repr(sent[:300]))
        seen.update(statuses(exchange(site.port, sent)))
        assert site.answers("/health", 200)

    each()
    print(seen)
    assert seen[202] and seen[400] and all(status < 500 for status in seen)
    assert web.popen.poll() is None
    unanswered = site.sql("SELECT count(*) FROM jobs")[0][0] - seen[202]
    assert 0 <= unanswered <= seen[0], "a refused request left a job"


def exchange(port: int, sent: bytes) -> bytes:
    """Sends these bytes and nothing more; gives all that came until the server closed the connection, as it must."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        came = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.3)
                while part := connection.recv(65536):
                    came += part
                    connection.settimeout(0.05)
            connection.settimeout(20)
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                came += part
        return came


def statuses(came: bytes) -> list[int]:
    """The status of each answer, which is a problem when it is the application's; 0 for no answer."""
    if not came.startswith(b"HTTP/1."):
        return [0]
    found = []
    while came:
        head, _, rest = came.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", 0))
        found.append(int(head.split()[1]))
        if length and found[-1] >= 400 and found[-1] < 500:
            assert fields[b"content-type"] == b"application/problem+json"
        came = rest[length:] if rest[:length].startswith((b"{", b"<")) else rest  # none after HEAD
    return found
