"""Why no whole answer came, in words for whoever reads the attempts: what, then perhaps a colon and details.

No address, no name and nothing that the receiver said is among them.
"""
from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator

import urllib3

_BROKE_OFF = "answer broke off"
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})


def in_words(error: BaseException, answered: bool) -> str:
    """The innermost cause that has words; `answered`: the failure came after the status line."""
    for cause in reversed(list(_chain(error))):
        if words := _of_tls(cause, answered) or _of_http(cause, answered) or _of_network(cause, answered):
            return words
    return "no usable answer"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from, outermost first."""
    while isinstance(error, BaseException):
        yield error
        before = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or before or getattr(error, "reason", None) or (error.args[0] if error.args else None)


def _of_tls(error: BaseException, answered: bool) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message.partition(',')[0].lower()}"
    if not isinstance(error, ssl.SSLError):
        return None
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return _BROKE_OFF if answered else "TLS failed: connection closed"
    if error.reason in _NOT_TLS:
        return "no TLS"
    return f"TLS failed: {(error.reason or 'no reason known').replace('_', ' ').lower()}"


def _of_http(error: BaseException, answered: bool) -> str | None:
    match error:
        case http.client.RemoteDisconnected():
            return "closed without an answer"
        case http.client.IncompleteRead() | urllib3.exceptions.IncompleteRead():
            return _BROKE_OFF
        case http.client.BadStatusLine() if _cut_short(str(error.args[0])):
            return _BROKE_OFF
        case http.client.BadStatusLine() | http.client.UnknownProtocol() | urllib3.exceptions.InvalidHeader():
            return "not HTTP"
        case http.client.LineTooLong() if not answered:
            return "headers too large: a line of more than 64 KiB"
        case http.client.HTTPException() if not answered:
            return "headers too large: more than 100"
        case http.client.HTTPException():
            return "not HTTP: a body that cannot be read"
    return None


def _cut_short(line: str) -> bool:
    return not line.endswith("\n") and line[:5] == "HTTP/"[:len(line)]


def _of_network(error: BaseException, answered: bool) -> str | None:
    match error:
        case socket.gaierror():
            return "name server did not answer" if error.errno == socket.EAI_AGAIN else "name not found"
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionError():
            return _BROKE_OFF if answered else "closed without an answer"
        case TimeoutError():
            return "no connection: timed out"
        case OSError() if error.strerror:
            return f"{_BROKE_OFF if answered else 'no connection'}: {error.strerror.lower()}"
    return None
