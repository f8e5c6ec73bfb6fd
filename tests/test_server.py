"""What comes over the wire and is no proper request: refused by the server or by the application, kept by neither."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import Site
from tests.wire import CHUNKED_JOB, JOB, request, wire

MARK = request("GET /problems/gone-astray")
HIDDEN = request("POST /jobs", b"Content-Length: 8", body=JOB)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, valkey: Any) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("web"), REDIS_URL=valkey.url, WEB_WORKERS=1) as site:
        site.start_alone("web")
        site.wait_answering()
        yield site


def count(web: Site) -> int:
    return web.sql("SELECT count(*) FROM jobs")[0][0]


def post(*headers: bytes, body: bytes = JOB) -> bytes:
    return request("POST /jobs", *headers, body=body)


BY_THE_SERVER = {
    "two lengths": (400, post(b"Content-Length: 8", b"Content-Length: 9")),
    "a length with a sign": (400, post(b"Content-Length: +8")),
    "a length below zero": (400, post(b"Content-Length: -1")),
    "a list of lengths": (400, post(b"Content-Length: 8, 8")),
    "no length": (400, post(b"Content-Length: ")),
    "a hexadecimal length": (400, post(b"Content-Length: 0x8")),
    "a length beyond all numbers": (400, post(b"Content-Length: 99999999999999999999")),
    "identity": (400, post(b"Transfer-Encoding: identity")),
    "chunked and then gzip": (400, post(b"Transfer-Encoding: chunked, gzip", body=CHUNKED_JOB)),
    "xchunked": (400, post(b"Transfer-Encoding: xchunked", body=CHUNKED_JOB)),
    "a space before the colon": (400, post(b"Transfer-Encoding : chunked", body=CHUNKED_JOB)),
    "a vertical tab": (400, post(b"Transfer-Encoding: \x0bchunked", body=CHUNKED_JOB)),
    "a folded header": (400, post(b"X-A: b\r\n c", b"Content-Length: 8")),
    "a folded coding": (400, post(b"Transfer-Encoding:\r\n chunked", body=CHUNKED_JOB)),
    "NUL in a header": (400, post(b"X-A: \x00", b"Content-Length: 8")),
    "chunks in HTTP/1.0": (400, post(b"Transfer-Encoding: chunked", body=CHUNKED_JOB).replace(b"/1.1", b"/1.0")),
    "HTTP/1.2": (400, post(b"Content-Length: 8").replace(b"/1.1", b"/1.2")),
    "HTTP/0.9": (400, b"GET /health\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "bytes beyond ASCII in the path": (400, request("GET /").replace(b"GET /", b"GET /\xff")),
    "a path of 70 KB": (414, request("GET /" + "a" * 70_000)),
    "101 headers": (431, post(*(b"X-%d: a" % number for number in range(98)), b"Content-Length: 8")),
    "headers of 300 KB": (431, post(b"X-A: " + b"a" * 300_000, b"Content-Length: 8")),
}


@pytest.mark.parametrize("case", BY_THE_SERVER)
def test_what_the_server_itself_refuses_ends_the_connection(web: Site, case: str) -> None:
    status, data = BY_THE_SERVER[case]
    before = count(web)
    with wire(web.port) as connection:
        connection.send(data + HIDDEN)
        answer = connection.answer()
        assert (answer.status, answer.body, answer.headers["connection"]) == (status, b"", "close")
        assert connection.is_over()
    assert count(web) == before


BY_THE_APPLICATION = {
    "two codings": (post(b"Transfer-Encoding: gzip, chunked", body=CHUNKED_JOB), 400, "bad-request"),
    "chunked twice": (post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=CHUNKED_JOB), 400,
                      "bad-request"),
    "two hosts": (post(b"Host: other.example", b"Content-Length: 8"), 400, "bad-request"),
    "an empty host": (post(b"Content-Length: 8").replace(b"h.example", b""), 400, "bad-request"),
    "no host": (post(b"Content-Length: 8").replace(b"Host: h.example\r\n", b""), 400, "bad-request"),
    "a host with a path": (post(b"Content-Length: 8").replace(b"h.example", b"h.example/jobs"), 400, "bad-request"),
    "a chunk without a size": (post(b"Transfer-Encoding: chunked", body=b"zz\r\n"), 400, "malformed-json"),
    "a chunk of a size below zero": (post(b"Transfer-Encoding: chunked", body=b"-8\r\n"), 400, "malformed-json"),
    "a line feed alone after a size": (post(b"Transfer-Encoding: chunked", body=b'8\n{"n": 5}\n0\n\n'), 400,
                                       "malformed-json"),
    "garbage for a chunk": (post(b"Transfer-Encoding: chunked", body=b'6\r\n{"n": \r\nzz\r\n'), 400, "malformed-json"),
    "a mebibyte and a byte, told": (post(b"Content-Length: 1048577", body=JOB + b" " * 1_048_569), 413, "too-large"),
    "a mebibyte and a byte, in chunks": (
        post(b"Transfer-Encoding: chunked", body=b'100001\r\n{"n": 5}' + b" " * 1_048_569 + b"\r\n0\r\n\r\n"), 413,
        "too-large"),
}


@pytest.mark.parametrize("case", BY_THE_APPLICATION)
def test_what_can_be_understood_in_two_ways_is_a_problem_and_ends_the_connection(web: Site, case: str) -> None:
    data, status, name = BY_THE_APPLICATION[case]
    before = count(web)
    with wire(web.port) as connection:
        connection.send(data)
        connection.answer().problem(status, name)
        assert connection.is_over()
    assert count(web) == before


@pytest.mark.parametrize("head", [
    request("POST /jobs", b"Content-Length: 100", body=JOB),
    request("POST /jobs", b"Transfer-Encoding: chunked", body=b'6\r\n{"n": \r\n')])
def test_a_body_that_breaks_off_is_not_taken_for_a_whole_one(web: Site, head: bytes) -> None:
    before = count(web)
    with wire(web.port) as connection:
        connection.send(head)
        connection.socket.shutdown(1)
        connection.answer().problem(400, "malformed-json")
    assert count(web) == before


@pytest.mark.parametrize("line", ["GET /health", "POST /nowhere", "DELETE /jobs", "HEAD /health", "POST /jobs"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_in_the_body_of_another_one_is_never_executed(web: Site, line: str, chunked: bool) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN) if chunked else HIDDEN
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(HIDDEN)
    before = count(web)
    with wire(web.port) as connection:
        connection.send(request(line, length, body=body) + MARK)
        connection.answer(line.split()[0])
        connection.answer().problem(404, "not-found")
    assert count(web) == before


def test_chunks_go_before_a_length_and_end_the_connection(web: Site) -> None:
    """RFC 9112 6.1. The server takes the length away before the application sees the request."""
    before = count(web)
    for length in (b"8", b"%d" % (len(CHUNKED_JOB) + len(HIDDEN)), b"0"):
        with wire(web.port) as connection:
            both = b"Content-Length: " + length, b"Transfer-Encoding: chunked"
            connection.send(post(*both, body=CHUNKED_JOB) + HIDDEN)
            assert connection.answer().status == 202
            assert connection.is_over()
    with wire(web.port) as connection:
        connection.send(post(b"Content-Length: 8", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n") + HIDDEN)
        connection.answer().problem(400, "malformed-json")
        assert connection.is_over()
    assert count(web) == before + 3


@pytest.mark.parametrize("method", ["TRACE", "FOO", "PUT", "PATCH", "DELETE", "PROPFIND"])
def test_any_other_method_is_told_which_ones_there_are(web: Site, method: str) -> None:
    with wire(web.port) as connection:
        connection.send(request(f"{method} /jobs"))
        answer = connection.answer(method)
        answer.problem(405, "method-not-allowed")
        assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("target", [
    "*", "jobs", "http://h.example", "/%ff", "/%00", "/a%0d%0aX-B:%20c", "/%2e%2e/jobs"])
def test_an_odd_target_is_not_found(web: Site, target: str) -> None:
    with wire(web.port) as connection:
        connection.send(request(f"GET {target}"))
        connection.answer().problem(404, "not-found")
        connection.send(request("CONNECT h.example:443"))
        connection.answer().problem(404, "not-found")


def test_a_head_with_a_body_gets_the_head_of_the_answer(web: Site) -> None:
    with wire(web.port) as connection:
        connection.send(request("HEAD /health", b"Content-Length: 8", body=JOB) + request("GET /health"))
        head, whole = connection.answer("HEAD"), connection.answer()
        assert head.status == 200 and head.body == b"" and whole.body
        assert head.headers["content-length"] == whole.headers["content-length"]


def test_only_http_1_is_spoken(web: Site) -> None:
    with wire(web.port) as connection:
        connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert connection.is_over()
    with wire(web.port) as connection:
        connection.send(request("GET /health", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c",
                                b"HTTP2-Settings: AAMAAABkAAQAAP__"))
        assert connection.answer().status == 200


def test_old_and_careful_clients_are_served(web: Site) -> None:
    before = count(web)
    with wire(web.port) as connection:
        connection.send(b"POST /jobs HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n" + JOB)
        assert connection.answer().status == 202 and connection.is_over()
    with wire(web.port) as connection:
        connection.send(request("POST /jobs", b"Content-Length: 8", b"Expect: 100-continue"))
        assert connection.stream.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(JOB)
        assert connection.answer().status == 202
        connection.send(request("POST /jobs", b"Content-Length: 104857600", b"Expect: 100-continue"))
        connection.answer().problem(413, "too-large")  # without asking for the body
    assert count(web) == before + 2
