"""Bodies that are too long or too slow cost little memory and no thread: everybody else is served."""
from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes import Process, Site
from tests.servers import wait_until
from tests.wire import JOB, Wire, request, wire

MIB = 1024 * 1024
BLOCK = b" " * 65536
CHUNK = b"10000\r\n" + BLOCK + b"\r\n"
LENGTH = b"Content-Length: %d" % (100 * MIB)
CHUNKED = b"Transfer-Encoding: chunked"
PLACES = 12  # of a process, for bodies that are being read: three in four of WEB_THREADS


@contextlib.contextmanager
def running(folder: Any, redis_url: str, **settings: Any) -> Iterator[tuple[Site, Process]]:
    with Site(folder, REDIS_URL=redis_url, **settings) as site:
        process = site.start_alone("web")
        site.wait_answering()
        yield site, process


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, valkey: Any) -> Iterator[tuple[Site, Process]]:
    with running(tmp_path_factory.mktemp("web"), valkey.url) as started:
        yield started


def resident(process: Process) -> int:
    return sum(member.memory_info().rss for member in process.family())


@contextlib.contextmanager
def watched(process: Process) -> Iterator[list[int]]:
    """Gives by how much the memory of it and all that descends from it has grown, at the most."""
    grown, over, before = [0], threading.Event(), resident(process)

    def watch() -> None:
        while not over.wait(0.02):
            grown[0] = max(grown[0], resident(process) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        over.set()
        watcher.join()


def upload(port: int, header: bytes) -> int:
    """Sends 100 MiB, as much of it as is wanted; returns the answer's status, 0 when there is none."""
    with wire(port) as connection:
        connection.send(request("POST /jobs", header))
        with contextlib.suppress(ConnectionError):
            for _ in range(1600):
                connection.socket.sendall(BLOCK if header == LENGTH else CHUNK)
        with contextlib.suppress(ConnectionError):
            return connection.answer().status
        return 0


@pytest.mark.parametrize("header", [LENGTH, CHUNKED])
def test_thirty_uploads_of_100_mib_at_once_are_refused_in_little_memory(
    web: tuple[Site, Process], header: bytes,
) -> None:
    site, process = web
    job_id = site.submit(n=5)
    with watched(process) as grown, ThreadPoolExecutor(30) as pool:
        uploads = [pool.submit(upload, site.port, header) for _ in range(30)]
        while not all(each.done() for each in uploads):
            assert site.get(f"/jobs/{job_id}").status_code == 200
            site.submit(n=5)
        assert {each.result() for each in uploads} <= {413, 0}
    assert grown[0] < 100 * MIB


def trickling(port: int, number: int, stack: contextlib.ExitStack) -> list[Wire]:
    """So many connections on which 64 KiB of a longer body have been sent, and the rest has not."""
    connections = [stack.enter_context(wire(port)) for _ in range(number)]
    for place, connection in enumerate(connections):
        told = b"Content-Length: %d" % MIB if place % 2 else CHUNKED
        connection.send(request("POST /jobs", told) + (BLOCK if place % 2 else CHUNK))
    return connections


def answered(connections: list[Wire]) -> int:
    return len(select.select([connection.socket for connection in connections], [], [], 0)[0])


def test_uploads_that_trickle_hold_up_nobody_who_asks(web: tuple[Site, Process]) -> None:
    """More than there are threads, places and waiters together. Each is read or refused, and whoever only asks is
    answered."""
    site, process = web
    job_id = site.submit(n=5)
    with contextlib.ExitStack() as stack, watched(process) as grown:
        connections = trickling(site.port, 100, stack)
        for _ in range(20):
            for connection in connections:
                with contextlib.suppress(ConnectionError):  # it was refused
                    connection.send(b"1\r\n \r\n" if connection in connections[::2] else b" ")
            assert site.get(f"/jobs/{job_id}").status_code == 200
        wait_until(lambda: answered(connections) >= 100 - 2 * PLACES, 20, "those without a place have an answer")
    assert grown[0] < 100 * MIB


def test_what_finds_no_place_is_told_to_come_back(tmp_path: Any, valkey: Any) -> None:
    """A slow body that has a place is accepted; the places are free again when their clients have gone."""
    with running(tmp_path, valkey.url, WEB_WORKERS=1) as (site, _):
        with contextlib.ExitStack() as stack:
            connections = trickling(site.port, PLACES + 9, stack)
            wait_until(lambda: answered(connections) >= 9, 20, "some have no place")
            ready = select.select([connection.socket for connection in connections], [], [], 0)[0]
            refused = [connection for connection in connections if connection.socket in ready]
            for answer in [connection.answer() for connection in refused]:
                answer.problem(503, "busy")
                assert int(answer.headers["retry-after"]) > 0
            assert all(connection.is_over() for connection in refused)
            patient = next(connection for place, connection in enumerate(connections)
                           if place % 2 and connection not in refused)  # its length was told
            patient.send(JOB + b" " * (MIB - len(BLOCK) - len(JOB)))
            assert patient.answer().status == 202
        wait_until(lambda: long_body(site) == 202, 20, "a long body has a place")
        assert site.sql("SELECT count(*) FROM jobs") == [(2,)]


def long_body(site: Site) -> int:
    """The answer's status to a job of a whole mebibyte."""
    told = {"Content-Type": "application/json"}
    return site.session.post(site.api + "/jobs", JOB + b" " * (MIB - len(JOB)), headers=told, timeout=20).status_code
