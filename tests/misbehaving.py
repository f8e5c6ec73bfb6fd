"""Receivers that do not do what HTTP asks of them, as threads on sockets; and certificates for them."""
from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from tests import programs

Play = Callable[[socket.socket, threading.Event], None]  # what it does with a connection, until the event


@contextlib.contextmanager
def server(play: Play) -> Iterator[int]:
    """Plays this with each connection; gives the port."""
    over, threads, opened = threading.Event(), list[threading.Thread](), list[socket.socket]()

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            play(connection, over)
        connection.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                connection, _ = listening.accept()
                opened.append(connection)
                threads.append(threading.Thread(target=run, args=(connection,), daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            for each in (listening, *opened):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join(10)


def read_request(connection: socket.socket) -> list[bytes]:
    """Reads the whole request, and returns its head: who closes a connection with unread bytes resets it."""
    with connection.makefile("rb") as stream:
        head = []
        while (line := stream.readline()) not in (b"\r\n", b""):
            head.append(line.rstrip())
        stream.read(sum(int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length:")))
        return head


def says(*parts: bytes) -> Play:
    """Reads the request, sends this and closes."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        read_request(connection)
        for part in parts:
            connection.sendall(part)

    return play


def endless(start: bytes, part: bytes, pause: float = 0.0) -> Play:
    """Sends `start`, and then `part` for ever."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        read_request(connection)
        connection.sendall(start)
        while not over.wait(pause):
            connection.sendall(part)

    return play


def drip(text: bytes, start: bytes = b"") -> Play:
    """Sends this byte by byte, far too slowly."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        read_request(connection)
        connection.sendall(start)
        drip_on(connection, text, over)

    return play


def drip_on(connection: socket.socket, text: bytes, over: threading.Event) -> None:
    """Goes on like that."""
    for byte in text:
        connection.sendall(bytes([byte]))
        if over.wait(0.2):
            return


def reset(start: bytes = b"") -> Play:
    """Sends this, and resets the connection."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        read_request(connection)
        connection.sendall(start)
        over.wait(0.2)  # a reset overtakes what the client has not read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return play


def never_reads(connection: socket.socket, over: threading.Event) -> None:
    over.wait(60)


def closes_at_once(connection: socket.socket, over: threading.Event) -> None:
    pass


def hangs_up(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(1 << 16)


def raw(text: bytes) -> Play:
    """Sends this whatever comes."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(text)
        connection.recv(1 << 16)

    return play


def bomb(megabytes: int) -> bytes:
    """An answer that is a thousand times as long once it is unpacked."""
    packed = gzip.compress(bytes(1 << 20)) * megabytes
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed


def over_tls(certificate: Path, play: Play, asked_for: list[str | None] | None = None) -> Play:
    """The same within TLS; ends without its closing word. `asked_for` gets the server names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if asked_for is not None:
        context.sni_callback = lambda _, name, __: asked_for.append(name)

    def wrapped(connection: socket.socket, over: threading.Event) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as inner:
            play(inner, over)

    return wrapped


def certificate(folder: Path, name: str, address: str = "", days: int = 1) -> Path:
    """A self-signed certificate with its key, of this name or address, which ends so many days from now."""
    file = folder / f"{name}{days}.pem"
    stands_for = f"IP:{address}" if address else f"DNS:{name}"
    ends = datetime.now(timezone.utc) + timedelta(days=days)
    key, request = folder / f"{name}{days}.key", folder / f"{name}{days}.csr"
    _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
             "-out", request, "-subj", f"/CN={name}")
    (folder / "ca.cnf").write_text(f"""
[ca]
default_ca = ca
[ca]
new_certs_dir = {folder}
database = {folder}/index.txt
serial = {folder}/serial
policy = anything
default_md = sha256
[anything]
commonName = supplied
[extensions]
subjectAltName = {stands_for}
basicConstraints = CA:TRUE
""")
    (folder / "index.txt").write_text("")
    (folder / "serial").write_text("01")
    _openssl("ca", "-batch", "-selfsign", "-config", folder / "ca.cnf", "-extensions", "extensions", "-keyfile", key,
             "-in", request, "-out", file, "-notext", "-startdate", "20200101000000Z",
             "-enddate", f"{ends:%Y%m%d%H%M%SZ}")
    file.write_text(file.read_text() + key.read_text())
    return file


def _openssl(*arguments: object) -> None:
    done = subprocess.run([programs.find("openssl"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
