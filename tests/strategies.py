"""What a client might send, for hypothesis: a good request with something odd about it, or anything at all."""
from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.twins import CALLBACK, Call

Drawn = TypeVar("Drawn")

MANY = int(os.environ.get("ANYTHING_EXAMPLES") or 0)  # so many examples, new ones each time; 0: few, always the same


def examples(few: int) -> settings:
    """How a test of this module's strategies is run."""
    return settings(
        max_examples=MANY or few, derandomize=not MANY, print_blob=bool(MANY), deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example])


@st.composite
def mostly(draw: Any, usual: Drawn, odd: st.SearchStrategy[Drawn], odds: int = 5) -> Drawn:
    """The usual value but for one time in so many."""
    return draw(odd) if draw(st.integers(1, odds)) == odds else usual


# --- bodies ---

NUMBERS = (
    "0", "-0", "5", "5.0", "5e0", "1e3", "1.5", "-1", "1000000000", "1000000001", "9" * 20, "9" * 1000, "9" * 5000,
    "-" + "9" * 400, "1e400", "-1e400", "1e-400", "0." + "1" * 2000, "1E+2", "05", "+5", "5.", ".5", "0x5", "1_0",
    "NaN", "Infinity", "-Infinity", "nan", "inf", "٥")
WORDS = ("true", "false", "null", "True", "nul", "undefined", "", "'a'")
CHARACTERS = (
    "\\u0000", "\\ud800", "\\udc00", "\\ud83d\\ude00", "\\ude00\\ud83d", "\\u2028", "\u2028", "\\uFFFF", "é", "😀",
    "\x00", "\x1f", "\\n", "\\\"", "\\x", "\\", "\"", "/", "\\/", "~", " ", "\ufeff", "a")
NAMES = ("n", "text", "kind", "callback_url", "id", "note_id", "a/b~c", "__proto__", "")

NASTY = CHARACTERS[:6]
_pieces = st.one_of(
    st.sampled_from(NASTY), st.sampled_from(CHARACTERS), st.text(max_size=3).map(lambda text: json.dumps(text)[1:-1]))
texts = st.lists(_pieces, max_size=4).map(lambda parts: '"' + "".join(parts) + '"')
leaves = st.one_of(st.sampled_from(NUMBERS), texts, st.sampled_from(WORDS), st.integers().map(str),
                   st.floats().map(json.dumps))
names = st.sampled_from(NAMES).map(json.dumps) | texts


def _composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=4).map(lambda parts: "[" + ",".join(parts) + "]")
    objects = st.lists(st.tuples(names, inner).map(":".join), max_size=4).map(lambda parts: "{" + ",".join(parts) + "}")
    return lists | objects


@st.composite
def _deep(draw: Any, inner: st.SearchStrategy[str]) -> str:
    opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"n":', "}]")]))
    depth = draw(st.sampled_from([30, 31, 32, 33, 16, 17, 1000, 100_000]))
    return opening * depth + draw(inner) + closing * draw(st.sampled_from([depth, 0]))


values = st.recursive(leaves, _composed, max_leaves=8)
documents = values | _deep(leaves)

GOOD: dict[str, tuple[dict[str, Any], ...]] = {
    "/jobs": ({"n": 5}, {"n": 5, "kind": "primes"}, {"n": 5, "callback_url": CALLBACK}),
    "/notes": ({"text": "a"}, {"text": "é😀\u2028"}, {"text": "a", "callback_url": CALLBACK}),
}
URLS = (
    CALLBACK, "http://127.0.0.1:9", "http://127.0.0.1:9/?a=\\u00e9", "http://[::1]/", "http://[::ffff:10.0.0.1]/",
    "http://0/", "http://1/", "http://0x7f.1/", "http:// /", "http://a b/", "//h/", "http://", "http://:9/",
    "http://u:p@127.0.0.1:9/", "http://127.0.0.1:99999/", "http://127.0.0.1:9/#f", "http://[/", "http://[::1",
    "HTTP://127.0.0.1:9/", "ftp://h/", "http://" + "a" * 64 + ".example/", "http://xn--/", "http://..../",
    "http://é.example/", "http://127.0.0.1:٩/",
    "http://127.0.0.1:9/" + "a" * 2100, "http://224.0.0.1/", "http://h\\u0001.example/",
    "http://%00/", "http://127.0.0.1:9\\\\@h/", "http://8.8.8.8/",
    "http://h.example.:80/", "http://" + "a." * 200 + "example/",
    "http://\\u2488.example/")


@st.composite
def near_bodies(draw: Any, path: str) -> str:
    """A good body with one thing changed."""
    members = [(json.dumps(name), json.dumps(value)) for name, value in draw(st.sampled_from(GOOD[path])).items()]
    place = draw(st.integers(0, len(members) - 1))
    match draw(st.sampled_from(["nothing", "value", "name", "more", "twice", "less", "url"])):
        case "value":
            members[place] = (members[place][0], draw(documents))
        case "name":
            members[place] = (draw(names), members[place][1])
        case "more":
            members.append((draw(names), draw(values)))
        case "twice":
            members.append(members[place])
        case "less":
            del members[place]
        case "url":
            url = draw(st.sampled_from(URLS)) if draw(st.booleans()) else draw(texts)[1:-1]
            members.append(('"callback_url"', f'"{url}"'))
    return "{" + ", ".join(f"{name}: {value}" for name, value in members) + "}"


@st.composite
def bodies(draw: Any, path: str) -> bytes:
    """Anything as a body, mostly something like JSON."""
    if draw(st.integers(1, 8)) == 8:
        return draw(st.binary(max_size=64))
    text = draw(near_bodies(path) | documents)
    encoding = draw(mostly("utf-8", st.sampled_from(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"]), 12))
    body = text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")
    return draw(mostly(body, _cut(body), 8))


@st.composite
def _cut(draw: Any, body: bytes) -> bytes:
    """A few bytes of it others, more or less."""
    at = draw(st.integers(0, len(body)))
    return body[:at] + draw(st.binary(max_size=2)) + body[at + draw(st.integers(0, 2)):]


# --- headers ---

visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20)
TYPES = (
    "application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/json;charset=utf-16",
    "application/json; charset", "application/json;;;", "application/problem+json", "application/jsonp",
    "application/*", "application/json, text/html", "text/json", ";", "", "multipart/form-data; boundary=x",
    "application/json\xa0",
    "application/x-www-form-urlencoded", "application/json; a=\"")
HEADERS: dict[str, st.SearchStrategy[str]] = {
    "Content-Type": st.sampled_from(TYPES),
    "Content-Encoding": st.sampled_from(["identity", "gzip", "IDENTITY", "", "identity, gzip", "br", " "]),
    "Idempotency-Key": st.sampled_from(
        ["k", '"k"', "", '""', '"', '"k', 'k"', "k k", "k,k", "é", "\t", "'", '"\\"', '"\\""', '"\\x"', "k" * 255,
         "k" * 256, '"' + "k" * 255 + '"', '"' + "\\\\" * 255 + '"', '"' + "\\\\" * 256 + '"', "%00", '"k";a=1',
         ":aGk=:", "?1", " k ", "k\x7f"]),
    "Authorization": st.sampled_from(
        ["Bearer alice-token", "Bearer bob-token", "bearer alice-token", "Bearer", "Bearer ", "Bearer  alice-token",
         "Basic YTpi", "Basic !", "Basic YQ==", "Bearer alice-tokén", "Digest a=", "Bearer a=b, c=d", "alice-token", "",
         "Bearer alice-token ", "Digest username=\"", "Token alice-token"]),
    "Prefer": st.sampled_from(
        ["wait=1", "wait=-1", "wait=9999999999", "wait", "wait=1.5", "respond-async, wait=10", 'wait="2"', "wait=;",
         "WAIT = 3 ; a", ",,,", "wait=٣"[:5] + "\xb3"]),
    "If-None-Match": st.sampled_from(
        ["*", '"a"', 'W/"a"', '"', "a", '"a", "b"', ",", 'W/"', "W/", '"a" "b"', '"\xe9"', '""']),
    "X-Forwarded-For": st.sampled_from(["203.0.113.1", "a, b", ",", "", "[::1]:5", "\xe9"]),
    "X-Forwarded-Host": st.sampled_from(
        ["evil.example", "a:b:c", "[::1", ":", "", "evil.example:99999", "a/b", "\xe9", " "]),
    "X-Forwarded-Proto": st.sampled_from(["https", "evil", "", "a, b", "\xe9", "javascript"]),
    "X-Forwarded-Prefix": st.sampled_from(
        ["/evil", "evil", "//evil.example", "/a b", "/", "", "/\xe9", "/..", "/a\"><b", "/a/", "?", "/a, /b"]),
    "X-Forwarded-Port": st.sampled_from(["1", "", "a", "99999"]),
    "Transfer-Encoding": st.sampled_from(["chunked", "gzip", "identity", "chunked, chunked", "", "Chunked"]),
    "Host": st.sampled_from(["evil.example", "", "a b", "[", "[::1]:8140", ":", "\xe9", "a:b", "127.0.0.1:8140"]),
    "Upgrade": st.sampled_from(["websocket", "h2c", "WebSocket"]),
    "Connection": st.sampled_from(["Upgrade", "close", "upgrade, keep-alive"]),
    "Range": st.sampled_from(["bytes=0-1", "bytes=-1", "x", "bytes=5-2", "bytes=0-0,2-3"]),
    "If-Range": st.sampled_from(['"a"', "x"]),
    "If-Modified-Since": st.sampled_from(["x", "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT"]),
    "If-Match": st.sampled_from(["*", '"a"', "x"]),
    "Accept": st.sampled_from(["text/html", "*/*;q=x", "", "application/json;q=0"]),
    "Cookie": st.sampled_from(["a=b", "=", ";;;", "\xe9"]),
    "Expect": st.sampled_from(["100-continue", "x"]),
    "Forwarded": st.sampled_from(["host=evil.example", ";"]),
}
USUAL = (("Content-Type", "application/json"), ("Authorization", "Bearer alice-token"))
READ = ("Content-Type", "Content-Encoding", "Idempotency-Key", "Authorization") * 4  # above all, what we read
LENGTHS = ("0", "1", "8", "1048576", "1048577", "99999999999999999999", "", "-1", "+8", "8, 8", "0x8", "8 ", "\xb2")


@st.composite
def headers(draw: Any, most: int = 6) -> tuple[tuple[str, str], ...]:
    """A good client's headers, with some of them odd, or gone, or more of them."""
    drawn = dict(USUAL)
    for name in draw(st.lists(st.sampled_from([*READ, *HEADERS]), min_size=1, max_size=most, unique=True)):
        drawn[name] = draw(HEADERS[name] if draw(st.integers(1, 4)) < 4 else visible)
    for name in draw(mostly([], st.lists(st.sampled_from(["Content-Type", "Authorization"]), max_size=2), 8)):
        drawn.pop(name, None)
    return tuple(drawn.items())


# --- addresses ---

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X-Y")
JOBS = ("{mine}", "{theirs}", "{ended}", "{told}", "{running}", "{expired}", "00000000-0000-7000-8000-000000000000",
        "00000000-0000-7000-8000-00000000000A", "x", "", "\x00", "%00", "..", "'", "\xff", "\xe9", "1", "a" * 5000)
NOTES = ("1", "0", "-1", "01", "2147483647", "2147483648", "9" * 10, "9" * 5000, "1.0", "\xb2", "1 ", "\x00", "x", "")
segments = st.text(st.characters(max_codepoint=0xFF, exclude_characters="?#"), max_size=8)
paths = st.one_of(
    st.sampled_from(
        ["/jobs", "/notes", "/jobs/", "/notes/", "/health", "/health/", "/", "", "//", "*", "//jobs", "/jobs//"]),
    st.tuples(
        st.sampled_from(JOBS), st.sampled_from(["", "/", "/cancel", "/deliveries", "/redeliver", "/cancel/", "/x"]),
    ).map(lambda parts: f"/jobs/{parts[0]}{parts[1]}"),
    st.tuples(st.sampled_from(NOTES), st.sampled_from(["", "/events", "/x"])).map(
        lambda parts: f"/notes/{parts[0]}{parts[1]}"),
    st.sampled_from(["expired", "nope", "", "<b>", "..", "%3Cb%3E", "a/b"]).map(lambda name: f"/problems/{name}"),
    st.lists(segments | st.sampled_from(["jobs", "notes", "problems", "1", "..", "."]), max_size=4).map(
        lambda parts: "/" + "/".join(parts)))

NAMES_ASKED = ("limit", "cursor", "status", "kind", "nope", "a/b~c", "%E9", "%00", "", "%FF", "limit%00",
               "%F0%9F%98%80")
VALUES_ASKED = (
    "1", "0", "100", "101", "-1", "1.0", "1e1", "+1", "%201", "1_0", "9" * 30, "9" * 5000, "%D9%A5", "queued",
    "QUEUED", "x", "primes", "primes%0A", "%00", "a%00b", "%FF", "%ED%A0%80", "", "{mine}", "%27", "2147483647",
    "2147483648",
    "true", "null", "NaN", "00000000-0000-7000-8000-000000000000", "00000000-0000-7000-8000-000000000000%0A")
queries = st.one_of(
    st.just(""),
    st.lists(
        st.tuples(st.sampled_from(NAMES_ASKED), st.sampled_from(VALUES_ASKED)).map("=".join), max_size=3).map("&".join),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="#"), max_size=20))


# --- calls ---


@st.composite
def submissions(draw: Any) -> Call:
    """A good submission but for its body."""
    path = draw(st.sampled_from(sorted(GOOD)))
    key = (("Idempotency-Key", "k"),) if draw(st.booleans()) else ()
    return Call(path=path, headers=(*USUAL, *key), body=draw(bodies(path)))


texts_to_keep = st.lists(_pieces, min_size=1, max_size=3).map(lambda parts: Call(
    path="/notes", headers=USUAL, body=('{"text": "' + "".join(parts) + '"}').encode("utf-8", "surrogatepass")))


@st.composite
def odd_headers(draw: Any) -> Call:
    """A good request but for its headers."""
    drawn, proxied = draw(headers()), draw(st.booleans())
    method, path = draw(st.sampled_from([
        ("POST", "/jobs"), ("POST", "/notes"), ("POST", "/jobs"), ("GET", "/jobs/{mine}"), ("GET", "/jobs/{ended}"),
        ("HEAD", "/jobs/{ended}"), ("GET", "/jobs"), ("GET", "/notes/1"), ("POST", "/jobs/{told}/redeliver"),
        ("POST", "/jobs/{mine}/cancel"), ("GET", "/health"), ("GET", "/problems/expired")]))
    body = json.dumps(GOOD[path][0]).encode() if path in GOOD and method == "POST" else b""
    return Call(method, path, "", drawn, body, draw(mostly(None, st.sampled_from(LENGTHS))), proxied)


addresses = st.builds(
    Call, mostly("GET", st.sampled_from(METHODS), 2), paths | st.sampled_from(sorted(GOOD)), queries,
    st.just(USUAL), st.just(b'{"n": 5}'))
anything = st.builds(
    Call, st.sampled_from(METHODS) | st.just("POST"), paths | st.sampled_from(sorted(GOOD)), queries, headers(8),
    bodies("/jobs") | bodies("/notes"), mostly(None, st.sampled_from(LENGTHS)), st.booleans())


# --- the bytes of a connection ---

HEADS = (
    b"POST /jobs HTTP/1.1\r\n", b"POST /notes HTTP/1.1\r\n", b"GET /jobs HTTP/1.1\r\n", b"GET /health HTTP/1.0\r\n",
    b"GET /%00%ff\xff HTTP/1.1\r\n", b"GET http://evil.example/jobs HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n", b"GET /jobs\r\n", b"GET  /jobs HTTP/1.1\r\n", b"GET /jobs HTTP/9.9\r\n", b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
    b"get /jobs HTTP/1.1\r\n", b"G\xc3\xa9T /jobs HTTP/1.1\r\n", b"GET /jobs#f HTTP/1.1\r\n", b"GET jobs HTTP/1.1\r\n")
LINES = (
    b"Host: h\r\n", b"Content-Type: application/json\r\n", b"Content-Length: 8\r\n", b"Content-Length: 9\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 8, 8\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Transfer-Encoding : chunked\r\n",
    b"Idempotency-Key: \xff\r\n", b"Idempotency-Key: k\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"X: a\r\n b\r\n", b"X\x00: a\r\n",
    b"X: \x00\r\n",
    b"no colon\r\n", b": nameless\r\n", b"X: " + b"a" * 70_000 + b"\r\n", b"X: a\r\n" * 150, b"Host: a\r\nHost: b\r\n",
    b"Authorization: \xe9\r\n", b"X: a\n", b"Range: bytes=0-0\r\n", b"Prefer: wait=0\r\n")
ENDS = (b'{"n": 5}', b"", b'{"n": NaN}', b'8\r\n{"n": 5}\r\n0\r\n\r\n', b"8\r\n{", b"zz\r\n", b"-1\r\n",
        b'{"n": 5}GET ')


@st.composite
def raw_requests(draw: Any) -> bytes:
    """Bytes for a server's socket: pieces of a request in their order, cut somewhere, or anything."""
    if draw(st.integers(1, 6)) == 6:
        return draw(st.binary(min_size=1, max_size=200))
    usual = [b"Host: h\r\n", b"Content-Type: application/json\r\n", b"Content-Length: 8\r\n"]
    lines = draw(mostly(usual, st.lists(st.sampled_from(LINES), max_size=5), 2))
    odd = draw(st.lists(st.sampled_from(LINES), max_size=2))
    sent = draw(st.sampled_from(HEADS)) + b"".join([*lines, *odd]) + b"\r\n" + draw(st.sampled_from(ENDS))
    return draw(mostly(sent, _cut(sent), 4)) or b"x"
