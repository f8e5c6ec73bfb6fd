"""Whatever a receiver does: the attempt ends in time and within bounds, and says why in plain words."""
from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import addresses
from tasks import deliver_webhook, egress
from tasks.egress import Unanswered
from tests import misbehaving, receiver as receivers, servers
from tests.asking import all_at_once
from tests.conftest import World, one_database
from tests.misbehaving import bomb, drip, endless, over_tls, raw, reset, says
from tests.outgoing import PUBLIC, another_delivery, is_readable, trusted
from tests.receiver import Receiver
from tests.running import finish

OK = b"HTTP/1.1 200 OK\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
# Of attempts that only their deadline ends. The status line of some must come before it, on whatever machine.
IMPATIENT = 2.0
PATIENT = 30.0  # of all others: however slow the machine is, what they must find out comes sooner
ENOUGH = 15.0  # for an attempt that IMPATIENT ends; what makes it wait goes on for longer
LATE = f"no whole answer within {IMPATIENT:g} s"
UNHEARD = "closed without an answer"
BROKE_OFF = "answer broke off"
GARBAGE = "not HTTP"
UNREADABLE = "not HTTP: a body that cannot be read"
TOO_MANY = "headers too large: more than 100"
TOO_LONG = "headers too large: a line of more than 64 KiB"

PLAYS: dict[str, tuple[misbehaving.Play, int | None, str | None]] = {
    "no answer": (endless(b"", b"", 0.5), None, LATE),
    "a slow status line": (drip(OK * 9), None, LATE),
    "slow headers": (drip(b"X-Drip: 1\r\n" * 9, start=OK), None, LATE),
    "endless 100 Continue": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), None, LATE),
    "endless headers": (endless(OK, b"X-Flood: 1\r\n"), None, TOO_MANY),
    "endless headers of a 100": (endless(b"HTTP/1.1 100 Continue\r\n", b"X-Flood: 1\r\n"), None, TOO_MANY),
    "100,000 headers": (says(OK, b"X-Flood: 1\r\n" * 100_000, b"\r\n"), None, TOO_MANY),
    "a header line of 10 MB": (says(OK, b"X-Flood: ", b"x" * 10_000_000, b"\r\n\r\n"), None, TOO_LONG),
    "an endless status line": (endless(b"HTTP/1.1 200 ", b"x" * 65536), None, TOO_LONG),

    "an answer after hints": (says(HINTS * 3, OK, b"Content-Length: 2\r\n\r\nok"), 200, None),
    "hints and nothing else": (endless(HINTS, b"", 0.5), None, LATE),
    "hints for ever": (endless(HINTS, HINTS), None, LATE),
    "closes after hints": (says(HINTS), None, UNHEARD),
    "another protocol from now on": (says(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"), None, GARBAGE),

    "a slow body": (drip(b"." * 99, start=OK + b"Content-Length: 99\r\n\r\n"), 200, LATE),
    "a slow body without a length": (drip(b"." * 99, start=OK + b"\r\n"), 200, LATE),
    "a slow chunk": (drip(b"." * 99, start=CHUNKED + b"99\r\n"), 200, LATE),
    "slow chunk sizes": (drip(b"1" * 99, start=CHUNKED), 200, LATE),
    "endless trailers": (endless(CHUNKED + b"0\r\n", b"X-Trailer: 1\r\n", 0.001), 200, LATE),
    "endless chunks": (endless(CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n"), 200, None),
    "endless small chunks": (endless(CHUNKED, b"1\r\nx\r\n" * 4096), 200, None),
    "a chunk of size -1": (endless(CHUNKED + b"-1\r\n", b"x" * 65536), 200, None),
    "an endless chunk size": (endless(CHUNKED, b"1" * 65536), 200, UNREADABLE),
    "no chunk size": (says(CHUNKED, b"nonsense\r\n"), 200, BROKE_OFF),
    "gigabytes": (endless(OK + b"Content-Length: 9999999999\r\n\r\n", b"x" * 65536), 200, None),
    "gigabytes without a length": (endless(OK + b"\r\n", b"x" * 65536), 200, None),
    "gigabytes of an error": (endless(b"HTTP/1.1 500 x\r\n\r\n", b"x" * 65536), 500, None),
    "a gzip bomb": (says(bomb(1000)), 200, None),

    "closes at once": (misbehaving.closes_at_once, None, UNHEARD),
    "closes": (says(), None, UNHEARD),
    "closes within the status line": (says(b"HTTP/1.1 2"), None, BROKE_OFF),
    "closes within the protocol's name": (says(b"HT"), None, BROKE_OFF),
    "closes within the headers": (says(b"HTTP/1.1 503 x\r\nConte"), None, BROKE_OFF),
    "closes before the headers": (says(b"HTTP/1.1 200 OK"), None, BROKE_OFF),
    "closes before the headers' end": (says(OK, b"Content-Length: 0\r\n"), None, BROKE_OFF),
    "closes within the body": (says(OK, b"Content-Length: 99\r\n\r\n."), 200, BROKE_OFF),
    "closes within a chunk": (says(CHUNKED, b"99\r\n."), 200, BROKE_OFF),
    "closes between chunks": (says(CHUNKED, b"1\r\n.\r\n"), 200, BROKE_OFF),
    "resets": (reset(), None, UNHEARD),
    "resets within the status line": (reset(b"HTTP/1.1 2"), None, UNHEARD),
    "resets within the body": (reset(OK + b"Content-Length: 99\r\n\r\n."), 200, BROKE_OFF),
    "resets within the body of an error": (reset(b"HTTP/1.1 500 x\r\nContent-Length: 99\r\n\r\n."), 500, BROKE_OFF),

    "garbage": (says(b"\x00\xff\xfe nonsense \r\n\r\n" * 99), None, GARBAGE),
    "HTTP/0.9": (says(b"<html>hello</html>"), None, GARBAGE),
    "another protocol": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), None, GARBAGE),
    "HTTP/2": (says(b"HTTP/2.0 200 OK\r\n\r\n"), None, GARBAGE),
    "a status that is none": (says(b"HTTP/1.1 20000 OK\r\n\r\n"), None, GARBAGE),
    "two lengths": (says(OK, b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456"), None, GARBAGE),
    "headers that are none": (says(b"HTTP/1.1 500 x\r\n\xff\x00: \r\n:\r\n no\r\n\r\n"), 500, None),
}


def tls_plays(folder: Path) -> dict[str, tuple[misbehaving.Play, int | None, str | None]]:
    own = misbehaving.certificate(folder, "own", "127.0.0.1")
    body = OK + b"Content-Length: 99\r\n\r\n."
    untrusted = "certificate not accepted: self-signed certificate"
    return {
        "no TLS": (raw(OK + b"\r\n"), None, "no TLS"),
        "a handshake of garbage": (raw(b"\x16\x03\x03\x00\x20" + b"\xff" * 32), None, "TLS failed: unexpected message"),
        "a handshake that is refused": (raw(b"\x15\x03\x03\x00\x02\x02\x28"), None,
                                        "TLS failed: sslv3 alert handshake failure"),
        "closes within the handshake": (misbehaving.hangs_up, None, "TLS failed: connection closed"),
        "no handshake": (misbehaving.never_reads, None, LATE),
        "half a handshake": (raw(b"\x16\x03\x03\x40\x00"), None, LATE),
        "a self-signed certificate": (over_tls(own, says(body)), None, untrusted),
    }


@contextlib.contextmanager
def full_queue() -> Iterator[int]:
    """A port whose queue of connections is full: one more waits for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as waiting:
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


@contextlib.contextmanager
def receivers_of_every_sort(folder: Path) -> Iterator[dict[str, tuple[str, int | None, str | None]]]:
    """For each: its address, and the code and the reason that its attempt must leave."""
    with contextlib.ExitStack() as running:
        yield {
            **{name: (f"http://127.0.0.1:{running.enter_context(misbehaving.server(play))}/", code, reason)
               for name, (play, code, reason) in PLAYS.items()},
            **{name: (f"https://127.0.0.1:{running.enter_context(misbehaving.server(play))}/", code, reason)
               for name, (play, code, reason) in tls_plays(folder).items()},
            "nobody": (f"http://127.0.0.1:{servers.free_port()}/", None, "connection refused"),
            "a full queue": (
                f"http://127.0.0.1:{running.enter_context(full_queue())}/", None, "no connection: timed out"),
            "an unknown name": ("http://unknown.invalid/", None, "name not found"),
        }


def let_names_be_unknown(monkeypatch: Any) -> None:
    """For names that no name server of this machine must be asked for."""
    really = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def patience(reason: str | None) -> float:
    """The timeout of the attempt that must leave this reason."""
    return IMPATIENT if reason == LATE else PATIENT


@one_database
def test_however_a_receiver_misbehaves_the_attempt_ends_in_time_and_says_why(
    api: FlaskClient, world: World, tmp_path: Path, monkeypatch: Any,
) -> None:
    let_names_be_unknown(monkeypatch)
    known = finish(api, f"http://{PUBLIC}/")
    world.set(CALLBACK_ALLOW="127.0.0.0/8", COURIER_CONCURRENCY=200)
    with receivers_of_every_sort(tmp_path) as sorts:
        made = {another_delivery(world, known, url): name for name, (url, _, _) in sorts.items()}
        for timeout in (IMPATIENT, PATIENT):
            world.set(CALLBACK_TIMEOUT_SECONDS=timeout)
            all_at_once([lambda each=each: deliver_webhook.run_once(each) for each, name in made.items()
                         if patience(sorts[name][2]) == timeout])
    rows = world.sql("SELECT delivery_id, response_code, error, duration_seconds FROM delivery_attempts")
    assert {made[row[0]]: (row[1], row[2]) for row in rows} == {
        name: (code, reason) for name, (_, code, reason) in sorts.items()}
    assert [row for row in rows if row[2] and not is_readable(row[2])] == []
    assert [row for row in rows if row[3] > (ENOUGH if row[2] == LATE else PATIENT)] == []
    states = dict(world.sql("SELECT id, state FROM deliveries"))
    for each, name in made.items():
        assert states[each] == ("delivered" if sorts[name][1] == 200 else "pending"), name


MEASURE = """
import gc, json, os, sys, threading, time
from tasks import egress
from tests.asking import all_at_once

def post(url, body=b"{}"):
    began = time.monotonic()
    try:
        egress.post(url, body, {}, 1.0)
    except egress.Unanswered:
        pass
    return time.monotonic() - began

def peak():  # of this program: ru_maxrss would be that of the process which started it, too
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def sockets():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [found for link in links if (found := os.path.lexists(link) and os.readlink(link)) and "socket" in found]

post(sys.argv[1]), post(sys.argv[1].replace("http:", "https:"))
time.sleep(0.1)
before = peak()
times = all_at_once([lambda url=url: post(url) for url in sys.argv[2:]])
after = peak()
egress.forget(), gc.collect()  # what is kept for the next callbacks to the same receivers
deadline = time.monotonic() + 30
while time.monotonic() < deadline and {t.name.split("_")[0] for t in threading.enumerate()} - {"MainThread", "lookup"}:
    time.sleep(0.01)
print(json.dumps({
    "megabytes": after - before, "longest": max(times), "sockets": sockets(),
    "threads": [t.name for t in threading.enumerate() if not t.name.startswith(("MainThread", "lookup"))]}))
"""


def test_misbehaviour_costs_little_memory_and_leaves_no_socket_or_thread(tmp_path: Path) -> None:
    """In a process of its own, all of them at once."""
    with receivers_of_every_sort(tmp_path) as sorts:
        urls = [url for url, _, _ in sorts.values() if "invalid" not in url]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, sorts["nobody"][0], *urls], capture_output=True, text=True, timeout=120,
            env={"ENV_FILE": "", "CALLBACK_ALLOW": "127.0.0.0/8", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["megabytes"] < 50 and found["longest"] < ENOUGH, found
    assert (found["sockets"], found["threads"]) == ([], []), found


@one_database
def test_no_more_than_64_kib_of_an_answer_are_read_and_nothing_is_unpacked(world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    for play in (says(bomb(1000)), endless(CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
                 endless(CHUNKED + b"-1\r\n", b"x" * 65536)):
        with misbehaving.server(play) as port:
            answer = egress.post(f"http://127.0.0.1:{port}/", b"{}", {}, PATIENT)
        assert answer.code == 200 and len(answer.excerpt) == egress.MAX_ANSWER_BYTES
        assert answer.excerpt.startswith((b"\x1f\x8b", b"x"))
    assert egress.MAX_ANSWER_BYTES == 65536


@one_database
def test_a_receiver_that_never_reads_ends_the_sending(world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    with misbehaving.server(misbehaving.never_reads) as port:
        began = time.monotonic()
        with pytest.raises(Unanswered, match=f"^{LATE}$"):
            egress.post(f"http://127.0.0.1:{port}/", bytes(64 << 20), {}, IMPATIENT)
    assert time.monotonic() - began < ENOUGH


@one_database
def test_a_kept_connection_is_watched_too(world: World, receiver: Receiver) -> None:
    clients = set()

    def respond(handler: Any, count: int) -> None:
        clients.add(handler.client_address)
        if count == 1:
            receivers.status(204)(handler, count)
        else:
            with contextlib.suppress(OSError):
                misbehaving.drip_on(handler.connection, OK * 9, threading.Event())

    receiver.respond = respond
    assert egress.post(receiver.url, b"{}", {}, PATIENT).code == 204
    began = time.monotonic()
    with pytest.raises(Unanswered, match=f"^{LATE}$"):
        egress.post(receiver.url, b"{}", {}, IMPATIENT)
    assert time.monotonic() - began < ENOUGH and len(clients) == 1


@one_database
def test_an_answer_that_follows_an_interim_one_is_not_the_next_requests(world: World, receiver: Receiver) -> None:
    clients = set()

    def respond(handler: Any, count: int) -> None:
        clients.add(handler.client_address)
        handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        receivers.status(200 if count == 1 else 503)(handler, count)

    receiver.respond = respond
    assert [egress.post(receiver.url, b"{}", {}, PATIENT).code for _ in range(3)] == [200, 503, 503]
    assert len(clients) == 1


# --- certificates that would be trusted, were they right ---


@one_database
@pytest.mark.parametrize("name,address,days,reason", [
    ("expired", "127.0.0.1", -1, "certificate not accepted: certificate has expired"),
    ("elsewhere.example", "", 1, "certificate not accepted: ip address mismatch"),
    ("right", "127.0.0.1", 1, None),
])
def test_a_certificate_must_be_valid_and_the_receivers(
    world: World, tmp_path: Path, name: str, address: str, days: int, reason: str | None,
) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    file = misbehaving.certificate(tmp_path, name, address, days)
    with misbehaving.server(over_tls(file, says(OK, b"Content-Length: 0\r\n\r\n"))) as port, trusted(file):
        url = f"https://127.0.0.1:{port}/"
        if reason is None:
            assert egress.post(url, b"{}", {}, PATIENT).code == 200
        else:
            with pytest.raises(Unanswered, match=f"^{reason}$"):
                egress.post(url, b"{}", {}, PATIENT)


@one_database
def test_an_answer_within_tls_that_breaks_off_is_told_so(world: World, tmp_path: Path) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    file = misbehaving.certificate(tmp_path, "own", "127.0.0.1")
    for play, reason in ((says(OK, b"Content-Length: 99\r\n\r\n."), BROKE_OFF), (drip(OK * 9), LATE)):
        with misbehaving.server(over_tls(file, play)) as port, trusted(file):
            with pytest.raises(Unanswered, match=f"^{reason}$"):
                egress.post(f"https://127.0.0.1:{port}/", b"{}", {}, patience(reason))


# --- name servers ---


@one_database
def test_a_name_server_that_does_not_answer_holds_up_nobody(
    api: FlaskClient, world: World, monkeypatch: Any,
) -> None:
    """Neither whoever submits, nor the attempt, nor those whose receivers need no name."""
    known = finish(api, f"http://{PUBLIC}/")
    released, really, asked = threading.Event(), socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".example"):
            asked.append(host)
            released.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "late")
        return really(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.5)
    monkeypatch.setattr(addresses, "_LOOKUPS_AT_ONCE", 2)
    addresses._lookups.cache_clear()
    try:
        with receivers.receiver() as told:
            world.set(CALLBACK_ALLOW=f"127.0.0.1:{told.port}")
            began = time.monotonic()
            url = "http://stalled.example/"
            assert api.post("/jobs", json={"n": 5, "callback_url": url}).status_code == 202
            monkeypatch.setattr(addresses, "LOOKUP_SECONDS", PATIENT)  # so that an attempt's own share of time is less
            world.set(CALLBACK_TIMEOUT_SECONDS=3)
            made = [another_delivery(world, known, f"http://stalled{number}.example/") for number in range(4)]
            all_at_once([lambda each=each: deliver_webhook.run_once(each) for each in made])
            world.set(CALLBACK_TIMEOUT_SECONDS=PATIENT)
            assert deliver_webhook.run_once(another_delivery(world, known, told.url)).state == "delivered"
            assert time.monotonic() - began < ENOUGH  # the name server takes four times as long
    finally:
        released.set()
        addresses._lookups().shutdown()
        addresses._lookups.cache_clear()
    reasons = {row[0] for row in world.sql("SELECT error FROM delivery_attempts WHERE error IS NOT NULL")}
    assert reasons == {"name server did not answer"}
    assert len(asked) == 2  # nobody waited any more for the others
