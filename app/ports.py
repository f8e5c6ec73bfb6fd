"""Ports on this machine."""
from __future__ import annotations

import socket


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def url(host: str, port: int) -> str:
    """Where a client finds it; an IPv6 address stands in brackets (RFC 3986 3.2.2)."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
