"""Callback addresses: which may be reached. Asked at submission, and again of the very address of each connection."""
from __future__ import annotations

import functools
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from typing import Any
from urllib.parse import urlsplit

from ssrfguard import DEFAULT_DENIED, AddressTable, Block, Policy, Reach, SSRFGuardError, Target
from ssrfguard import resolve as resolve_and_check

from app.config import settings
from app.errors import EndpointRefused

MAX_URL_LENGTH = 2048
LOOKUP_SECONDS = 3.0  # a name server that does not answer must hold up neither a submission nor a delivery
_LOOKUPS_AT_ONCE = 16
_ANY_PORT = frozenset(range(1, 65536))

# Azure's platform address is public by the registries, and serves instance metadata.
_DENIED = AddressTable((
    *DEFAULT_DENIED.blocks,
    Block(ipaddress.ip_network("168.63.129.16/32"), "Cloud metadata (Azure)", "none", Reach.DENIED),
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
    try:
        parts = urlsplit(url)
        origin = (parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0))
    except ValueError as error:
        raise EndpointRefused(f"not a URL: {error}") from None
    if "#" in url:
        raise EndpointRefused("a fragment never reaches the receiver")
    opened, default = _policies(settings().callback_allow)
    policy = opened.get(origin, default)
    try:
        return policy, policy.check_url(url)
    except SSRFGuardError as error:
        raise EndpointRefused(reason(error)) from None


def reason(error: SSRFGuardError) -> str:
    """Why an address was refused, without the URL itself (it may hold a secret)."""
    return str(getattr(error, "reason", error))


def lookup(host: str, port: int | None, *args: Any, **kwargs: Any) -> Any:
    """`socket.getaddrinfo` within LOOKUP_SECONDS; raises `socket.gaierror` when the answer takes longer."""
    try:
        return _lookups().submit(socket.getaddrinfo, host, port, *args, **kwargs).result(LOOKUP_SECONDS)
    except LookupTimeout:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {LOOKUP_SECONDS:g} s") from None


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
        max_url_length=MAX_URL_LENGTH, max_connection_attempts=2)
