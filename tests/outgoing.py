"""What callbacks do on the network: the connections that were made, a name server that says what it is told, and
deliveries whose address was put there behind the API's back."""
from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import addresses
from tasks import egress
from tests.conftest import World

PUBLIC = "93.184.216.34"
_numbers = itertools.count()
_TECHNICAL = re.compile(r"Error|Exception|0x[0-9a-f]{6}|object at|errno|allow_|max_|://|[{}<>_]")


def another_delivery(world: World, known: str, url: str) -> str:
    """One more delivery of the same job, due now, to an address that nobody has checked."""
    made = f"{known}-{next(_numbers)}"
    world.sql(
        "INSERT INTO deliveries (id, job_id, url, host, endpoint, state, attempts, next_attempt_at, created_at) "
        "SELECT :made, job_id, :url, :made, :made, 'pending', 0, created_at, created_at FROM deliveries "
        "WHERE id = :known",
        made=made, url=url, known=known)
    return made


def attempt_of(world: World, delivery_id: str) -> tuple[int | None, str]:
    """The code and the reason of its only attempt."""
    ((code, error),) = world.sql(
        "SELECT response_code, error FROM delivery_attempts WHERE delivery_id = :id", id=delivery_id)
    return code, error


def is_readable(reason: str) -> bool:
    """Whether it is a short phrase, for a person who knows no Python."""
    return 5 < len(reason) < 160 and not _TECHNICAL.search(reason)


@contextlib.contextmanager
def connections(monkeypatch: pytest.MonkeyPatch, world: World) -> Iterator[list[Any]]:
    """Where any socket of this process was connected to, but for Redis. No other machine is reached."""
    made: list[Any] = []
    redis_port = world.redis.connection_pool.connection_kwargs["port"]

    def recording(name: str) -> Any:
        really = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            if address[1] != redis_port:
                made.append(address[:2])
            if not ipaddress.ip_address(address[0]).is_loopback:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")
            return really(self, address)

        return connect

    with monkeypatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, recording(name))
        yield made


@contextlib.contextmanager
def listener(host: str = "::") -> Iterator[socket.socket]:
    """Waits on every address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as waiting:
        if host == "::":
            waiting.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        waiting.bind((host, 0))
        waiting.listen()
        waiting.setblocking(False)
        yield waiting


def nobody_came(waiting: socket.socket) -> bool:
    try:
        waiting.accept()[0].close()
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def trusted(file: Path) -> Iterator[None]:
    """Callbacks believe this certificate, for the block."""
    egress.forget()
    session = egress._session(egress.os.getpid(), addresses.policy_for("https://127.0.0.1:1/"))
    session.verify = str(file)
    try:
        yield
    finally:
        session.close()
        egress.forget()


def name_server(monkeypatch: pytest.MonkeyPatch, **answers: list[Any]) -> list[str]:
    """Stands in for the resolver: a name (`_` for `.`) has these answers, one after the other, the last one for ever.
    An answer is a list of addresses or an exception. Any other name is unknown. Returns what was asked."""
    asked: list[str] = []
    really = socket.getaddrinfo
    names = {name.replace("_", "."): iter([*said, *itertools.repeat(said[-1], 100)]) for name, said in answers.items()}

    def getaddrinfo(host: str, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        if host not in names:
            numeric = 0 if host == "localhost" else socket.AI_NUMERICHOST
            return really(host, port, family, type, proto, flags | numeric)
        asked.append(host)
        answer = next(names[host])
        if isinstance(answer, Exception):
            raise answer
        return [row for address in answer for row in really(address, port, 0, type, proto, socket.AI_NUMERICHOST)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked
