"""The only outbound socket: one POST to a callback address, bounded in every direction."""
from __future__ import annotations

import contextlib
import functools
import http.cookiejar
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import urllib3
from ssrfguard import Policy, SSRFGuardError
from ssrfguard.requests import SafeAdapter, Session

from app import addresses
from app.config import settings
from app.errors import EndpointRefused
from tasks import answers, deadlines, reasons

CONNECT_SECONDS = 3.0  # to each address of a name
_NET_SECONDS = 1.0  # below the deadline, which ends every wait sooner and says so
MAX_ANSWER_BYTES = 64 * 1024
_CHUNK_BYTES = 4096  # an answer is shorter, as a rule
_POOLS = 32  # hosts whose connections are kept; twice as many as 64 threads call with four at a time
_ROUTES = 512  # URLs; a receiver has one or a few, or one for each callback, which are of no use again
_USER_AGENT = "uketsuke/0.1 (+webhook)"


@dataclass(frozen=True)
class Answer:
    """What the receiver answered; `excerpt` holds the first MAX_ANSWER_BYTES of the body at most, undecoded."""

    code: int
    retry_after: str | None
    excerpt: bytes
    content_encoding: str | None = None


class Unanswered(Exception):
    """No whole answer came; the message says why, `code` is the status line's if there was one."""

    def __init__(self, why: str, code: int | None = None) -> None:
        super().__init__(why)
        self.code = code


def post(url: str, body: bytes, headers: dict[str, str], timeout: float) -> Answer:
    """One attempt: never longer than `timeout` seconds, name look-up and connecting included, never redirected, never
    through a proxy, never to an address that `addresses` refuses.

    Raises EndpointRefused without having connected, and Unanswered.
    """
    with _deadline(timeout) as deadline:
        code = None
        try:
            route = _route(os.getpid(), url, settings().callback_allow)
            response = route.send(body, headers, (min(CONNECT_SECONDS, deadline.share), timeout + _NET_SECONDS))
            try:
                code = response.status
                excerpt = _read(response)
                deadline.check()
                said = response.headers
                return Answer(code, said.get("Retry-After"), excerpt, said.get("Content-Encoding"))
            finally:
                _leave(response)
        except SSRFGuardError as error:
            raise EndpointRefused(addresses.reason(error)) from None
        except (requests.exceptions.InvalidURL, urllib3.exceptions.LocationValueError):
            raise EndpointRefused("not a URL that can be called") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            late = f"no whole answer within {timeout:g} s"
            raise Unanswered(late if deadline.over else reasons.in_words(error, code is not None), code) from None


def _read(response: urllib3.BaseHTTPResponse) -> bytes:
    """At most MAX_ANSWER_BYTES, as they came: a compressed body is not unpacked."""
    kept = bytearray()
    while len(kept) < MAX_ANSWER_BYTES:
        # Not `read`: a chunk that says its size is -1 would be read to its end, whatever was asked for.
        chunk = response.read1(min(_CHUNK_BYTES, MAX_ANSWER_BYTES - len(kept)), decode_content=False)
        if not chunk:
            break
        kept += chunk
    return bytes(kept[:MAX_ANSWER_BYTES])


def _leave(response: urllib3.BaseHTTPResponse) -> None:
    """A connection whose answer was read to its end is kept for the next attempt; any other is closed."""
    response.close()
    response.release_conn()


# --- the deadline: `requests` bounds each wait, not their sum, and threads cannot be interrupted ---


class _Running:
    """The running attempt of a thread: when its time is over, its sockets are shut and every wait on them ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.share = seconds / (1 + addresses.ADDRESSES_TRIED)  # of the look-up, and of connecting to each address
        self.over = False
        self.lock = threading.Lock()
        self.sockets: list[socket.socket] = []

    def check(self) -> None:
        if self.over:
            raise OSError("too late")

    def watch(self, used: socket.socket) -> None:
        """Remembers a socket that the attempt uses, by a descriptor of its own: TLS replaces the first one. From now on
        it is the deadline that ends a wait."""
        if used.gettimeout() != self.seconds + _NET_SECONDS:
            used.settimeout(self.seconds + _NET_SECONDS)
        again = os.dup(used.fileno())
        with self.lock:
            self.sockets.append(socket.socket(used.family, used.type, used.proto, again))  # told, it asks nobody
        if self.over:
            self.shut()

    def shut(self) -> None:
        self.over = True
        with self.lock:
            for used in self.sockets:
                with contextlib.suppress(OSError):
                    used.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self.lock:
            for used in self.sockets:
                used.close()
            self.sockets.clear()


_this_thread = threading.local()


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[_Running]:
    running = _Running(seconds)
    deadlines.add(running, seconds)
    _this_thread.running = running
    try:
        yield running
    finally:
        deadlines.remove(running)
        _this_thread.running = None
        running.close()


def _watched(connection_class: type) -> type:
    """The same connection class, whose sockets the running attempt's deadline can shut, and whose requests leave in one
    piece: two would wake the receiver twice."""

    def new_conn(self: Any) -> socket.socket:
        opened = connection_class._new_conn(self)  # type: ignore[attr-defined]
        _this_thread.running.watch(opened)
        return opened

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sock is not None:  # kept alive from an earlier attempt
            _this_thread.running.watch(self.sock)
            self.timeout = self.sock.gettimeout()
        self.pieces = []
        try:
            connection_class.request(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            pieces, self.pieces = self.pieces, None
        self.send(b"".join(pieces))

    def send(self: Any, data: bytes) -> None:
        if self.pieces is None:
            connection_class.send(self, data)  # type: ignore[attr-defined]
        else:
            self.pieces.append(data)

    return type(f"Watched{connection_class.__name__}", (connection_class,), {
        "_new_conn": new_conn, "request": request, "send": send, "pieces": None,
        "response_class": answers.FinalAnswer})


class _WatchedAdapter(SafeAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            scheme: type(f"Watched{pool.__name__}", (pool,), {"ConnectionCls": _watched(pool.ConnectionCls)})
            for scheme, pool in self.poolmanager.pool_classes_by_scheme.items()
        }


class _OneAnswer(Session):
    """A session that takes the first answer: `requests` reads a redirect's whole body even when it does not follow."""

    def get_redirect_target(self, response: requests.Response) -> None:
        return None


def _lookup(*asked: Any) -> Any:
    return addresses.lookup(*asked, seconds=_this_thread.running.share)


@functools.lru_cache(maxsize=64)
def _session(pid: int, policy: Policy) -> Session:
    session = _OneAnswer(policy=policy, resolver=_lookup)
    for scheme in ("http://", "https://"):
        session.mount(scheme, _WatchedAdapter(
            policy=policy, resolver=_lookup, pool_connections=_POOLS, pool_maxsize=_POOLS))
    session.trust_env = False  # neither proxies nor ~/.netrc
    session.cookies.set_policy(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
    session.headers["User-Agent"] = _USER_AGENT
    del session.headers["Accept-Encoding"]
    return session


def forget() -> None:
    """Nothing is kept any more for the next attempts."""
    _route.cache_clear()
    _session.cache_clear()


# --- the way to a URL: what `requests` would work out anew for each attempt ---


@dataclass(frozen=True)
class _Route:
    """How a URL that may be called is called."""

    session: Session
    adapter: SafeAdapter
    url: str
    target: str
    headers: Mapping[str, str]
    pool: Mapping[str, Any]  # what tells the pool of its connections

    def send(
        self, body: bytes, headers: dict[str, str], timeout: tuple[float, float],
    ) -> urllib3.BaseHTTPResponse:
        """As `requests` does it for a session. A connection is made, and its address checked, by the pool."""
        pool: Any = self.adapter.poolmanager.connection_from_host(**self.pool)
        self.adapter.cert_verify(pool, self.url, self.session.verify, None)
        answer: urllib3.BaseHTTPResponse = pool.urlopen(
            "POST", self.target, body, {**self.headers, **headers}, self.adapter.max_retries, redirect=False,
            assert_same_host=False, timeout=urllib3.Timeout(connect=timeout[0], read=timeout[1]),
            preload_content=False, decode_content=False)
        return answer


@functools.lru_cache(maxsize=_ROUTES)
def _route(pid: int, url: str, allow: tuple[str, ...]) -> _Route:
    """Raises EndpointRefused, and what `requests` raises for what is no URL."""
    session = _session(pid, addresses.policy_for(url))
    prepared = session.prepare_request(requests.Request("POST", url, {"Content-Type": "application/json"}))
    del prepared.headers["Content-Length"]
    adapter = session.get_adapter(prepared.url or "")
    assert isinstance(adapter, SafeAdapter)
    host, how = adapter.build_connection_pool_key_attributes(prepared, session.verify or True)
    return _Route(session, adapter, prepared.url or "", adapter.request_url(prepared, {}), dict(prepared.headers),
                  {**host, "pool_kwargs": how})
