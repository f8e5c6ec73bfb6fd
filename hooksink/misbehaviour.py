"""What a path asks for beside the usual answer, so that a person can see what a sender does then."""
from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_SLOW_SECONDS = 120
MAX_FLAKY_TIMES = 1000
_IDS_COUNTED = 10_000
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Misbehaviour:
    """`fail_times` with 503, then `status` after `wait_seconds`; `headers` go with every answer but 204."""

    fail_times: int = 0
    wait_seconds: float = 0
    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)


def asked(path: str, retry_after: str | None) -> Misbehaviour:
    """What a path, without its first slash, asks for; `retry_after` is the query's. Raises ValueError with one line."""
    name, _, value = path.partition("/")
    if name == "slow":
        return Misbehaviour(wait_seconds=_number(value, 0, MAX_SLOW_SECONDS, "/slow/<seconds>"))
    if name == "flaky":
        times = _number(value, 0, MAX_FLAKY_TIMES, "/flaky/<times>", whole=True)
        return Misbehaviour(fail_times=int(times), headers=_retry_after(retry_after))
    if name == "status":
        code = int(_number(value, 200, 599, "/status/<code>", whole=True))
        # Whoever follows it is seen there.
        location = {"Location": "/followed"} if code in _REDIRECTS else {}
        return Misbehaviour(status=code, headers=location | _retry_after(retry_after))
    return Misbehaviour()


class Failures:
    """How often each webhook id was failed on purpose."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[tuple[str, int], int] = OrderedDict()

    def once_more(self, webhook_id: str, times: int) -> bool:
        """Whether this one is still among the first so many of its id."""
        with self._lock:
            so_far = self._times.pop((webhook_id, times), 0)
            self._times[webhook_id, times] = min(so_far + 1, times)
            if len(self._times) > _IDS_COUNTED:
                self._times.popitem(last=False)
        return so_far < times


def _retry_after(given: str | None) -> dict[str, str]:
    if given is None:
        return {}
    return {"Retry-After": str(int(_number(given, 0, 10**9, "?retry_after=<seconds>", whole=True)))}


def _number(text: str, least: int, most: int, form: str, whole: bool = False) -> float:
    pattern = r"[0-9]{1,10}" if whole else r"[0-9]{1,10}(\.[0-9]{1,10})?"
    if not re.fullmatch(pattern, text) or not least <= float(text) <= most:
        raise ValueError(f"{form} takes {'a whole number' if whole else 'a number'}, {least} to {most}")
    return float(text)
