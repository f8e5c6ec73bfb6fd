"""Callback addresses: which may be reached. Asked at submission, and again of the very address of each connection."""
from __future__ import annotations

import dataclasses
import functools
import ipaddress
import math
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ssrfguard import DEFAULT_DENIED, AddressTable, Block, Policy, Reach, SSRFGuardError, Target
from ssrfguard import resolve as resolve_and_check
from urllib3.util import parse_url

from app.config import settings
from app.errors import EndpointRefused

MAX_URL_LENGTH = 2048
LOOKUP_SECONDS = 3.0  # a name server that does not answer must hold up neither a submission nor a delivery
ADDRESSES_TRIED = 2  # of a name that has several; each may take 3 s of the 15 s of an attempt
# As many as a courier has threads. One that nobody waits for any more still takes its thread until the name server
# gives up.
_LOOKUPS_AT_ONCE = 64
_PORTS = {"http": 80, "https": 443}
_ANY_PORT = frozenset(range(1, 65536))


def _denied(network: str, name: str, rfc: str) -> Block:
    return Block(ipaddress.ip_network(network), name, rfc, Reach.DENIED)


# A receiver has a global unicast address of its own: nothing that the registries list as special is one, also not what
# carries another address in it, or means the nearest server of some kind.
_DENIED = AddressTable((
    *(dataclasses.replace(block, reach=Reach.DENIED) for block in DEFAULT_DENIED.blocks),
    *(_denied(network, "not global unicast", "RFC4291") for network in ("::/3", "4000::/2", "8000::/1")),
    _denied("168.63.129.16/32", "Cloud metadata (Azure)", "no RFC"),  # public by the registries
))


def policy_for(url: str) -> Policy:
    """What a connection for this URL may reach: public addresses and the networks of CALLBACK_ALLOW on any port; a
    `host:port` of CALLBACK_ALLOW opens just that host at just that port.

    Raises EndpointRefused for what is no URL, or names what may not be reached without any look-up.
    """
    return _admit(url)[0]


def check(url: str) -> None:
    """Refuses what may not be called: raises EndpointRefused with the reason.

    A name is looked up, for LOOKUP_SECONDS at most; one that cannot be resolved now passes, since each connection
    asks again.
    """
    policy, target = _admit(url)
    try:
        resolve_and_check(target, policy=policy, resolver=lookup)
    except SSRFGuardError as error:
        raise EndpointRefused(reason(error)) from None
    except OSError:
        return


def _admit(url: str) -> tuple[Policy, Target]:
    origin = _origin(url)
    opened, default = _policies(settings().callback_allow)
    policy = opened.get(origin, default)
    try:
        policy.check_url(url)
        return policy, policy.check_url(_as_sent(url))
    except SSRFGuardError as error:
        raise EndpointRefused(reason(error)) from None


def _as_sent(url: str) -> str:
    """What the HTTP client reads in it, which must be no other place: parsers differ."""
    try:
        parts = parse_url(url)
    except ValueError:
        raise EndpointRefused("not a URL") from None
    return f"{parts.scheme}://{parts.host}:{parts.port or _PORTS.get(parts.scheme or '')}/"


def _origin(url: str) -> tuple[str, int]:
    """Host and port, of what has the form of a callback address; what is wrong is said without the URL."""
    if len(url) > MAX_URL_LENGTH:
        raise EndpointRefused(f"longer than {MAX_URL_LENGTH} characters")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise EndpointRefused("not a URL") from None
    if parts.scheme not in _PORTS:
        raise EndpointRefused("neither http nor https")
    if "@" in parts.netloc:
        raise EndpointRefused("it holds user info, which would be kept and shown")
    if "#" in url:
        raise EndpointRefused("a fragment never reaches the receiver")
    return host, _port(parts)


def _port(parts: SplitResult) -> int:
    try:
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0 or parts.netloc.endswith(":"):
        raise EndpointRefused("the port is no number from 1 to 65535")
    return port


_ADVICE = re.compile(r": |; |, which |, so ")  # what follows is for whoever programs with the library


def reason(error: SSRFGuardError) -> str:
    """Why an address was refused, without the URL itself (it may hold a secret)."""
    return _ADVICE.split(str(getattr(error, "reason", error)))[0]


def lookup(
    host: str, port: int | None, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0,
    *, seconds: float = math.inf,
) -> Any:
    """`socket.getaddrinfo` within LOOKUP_SECONDS, or less; raises `socket.gaierror` when the answer takes longer.

    `localhost` and the names below it are this machine's, whatever the name server says (RFC 6761).
    """
    if f".{host.rstrip('.').lower()}".endswith(".localhost"):
        host = "localhost"
    if flags & socket.AI_NUMERICHOST:
        return socket.getaddrinfo(host, port, family, type, proto, flags)
    asked = _lookups().submit(socket.getaddrinfo, host, port, family, type, proto, flags)
    try:
        return asked.result(min(seconds, LOOKUP_SECONDS))
    except LookupTimeout:
        asked.cancel()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer in time") from None


@functools.lru_cache(maxsize=1)
def _lookups() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="lookup")


@functools.lru_cache(maxsize=8)
def _policies(allow: tuple[str, ...]) -> tuple[dict[tuple[str, int], Policy], Policy]:
    networks, opened = [], {}
    for entry in allow:
        host, colon, port = entry.rpartition(":")
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError:
            opened[host.strip("[]").lower(), int(port)] = _opened(host.strip("[]"), int(port))
    return opened, _policy(networks, _ANY_PORT)


def _opened(host: str, port: int) -> Policy:
    try:
        network = ipaddress.ip_network(host)
    except ValueError:  # a name: wherever it points
        everywhere = [ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")]
        return _policy(everywhere, frozenset({port}), frozenset({host}))
    return _policy([network], frozenset({port}))


def _policy(networks: list[Any], ports: frozenset[int], hosts: frozenset[str] = frozenset()) -> Policy:
    return Policy(
        denied_networks=_DENIED, allowed_networks=tuple(networks), allowed_ports=ports, allowed_hosts=hosts,
        max_url_length=MAX_URL_LENGTH, max_connection_attempts=ADDRESSES_TRIED)
