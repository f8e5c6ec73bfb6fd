"""Circuits: how each endpoint has answered lately, and what it may take up for that. An endpoint is a callback URL
without its query.

One that has not answered yet, or answered slowly, gets half of its host's attempts at a time; one that failed last gets
one; one that has failed for long is left alone between its attempts, until one of them is answered.
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from app import backoff, statements, states
from app.clock import isoformat
from app.schema import endpoints

log = logging.getLogger("uketsuke.circuits")

SLOW_SECONDS = 2.0  # an answer that took longer; most receivers write the hook down and answer within a second
# Both, before an endpoint is paused: few failures may be few callbacks, and many within minutes a deployment, which
# takes less than ten of them.
FAILURES_IN_A_ROW = 10
FAILING_SECONDS = 600.0


@dataclass(frozen=True)
class Circuit:
    """A row of `endpoints`."""

    id: str
    host: str
    standing: str
    failures: int
    failing_since: datetime | None
    paused_until: datetime | None
    noted_at: datetime


_columns = [endpoints.c[field.name] for field in fields(Circuit)]


def endpoint_of(url: str) -> str:
    """The id of the endpoint that this URL calls."""
    return hashlib.sha256(url.partition("?")[0].encode()).hexdigest()


_find = select(*_columns).where(endpoints.c.id == bindparam("endpoint"))


def find(view: Connection, endpoint: str) -> Circuit | None:
    """How this endpoint has answered; None when it has not been tried."""
    return found(statements.rows(view, *finding(endpoint)))


def finding(endpoint: str) -> tuple[Any, dict[str, Any]]:
    """What `find` asks for, to be asked together with something else; `found` reads the answer."""
    return _find, {"endpoint": endpoint}


def found(rows: Sequence[tuple[Any, ...]]) -> Circuit | None:
    """The answer to `finding`."""
    return Circuit(*rows[0]) if rows else None


_of_host = select(endpoints.c.standing).where(
    endpoints.c.host == bindparam("of_host")).order_by(endpoints.c.noted_at.desc()).limit(1)


def standing_of_host(view: Connection, host: str) -> str | None:
    """How the endpoint of this host answered that was noted last: what to expect of one that has not been tried, where
    each callback has a path of its own. None when none has been tried."""
    return view.execute(_of_host, {"of_host": host}).scalar_one_or_none()


def as_document(circuit: Circuit) -> dict[str, Any]:
    """An endpoint's standing as clients read it."""
    moments = {"failing_since": circuit.failing_since, "paused_until": circuit.paused_until}
    return {"standing": circuit.standing, "failures": circuit.failures,
            **{name: isoformat(at) for name, at in moments.items() if at is not None}}


def attempts_at_a_time(standing: str | None, per_host: int) -> int:
    """How many of its host's attempts an endpoint of this standing may take up, so that others have the rest."""
    if standing == states.WELL:
        return per_host
    return 1 if standing == states.FAILING else max(1, per_host // 2)


def paused(circuit: Circuit | None, now: datetime) -> datetime | None:
    """Until when this endpoint is left alone; None when it is not."""
    until = None if circuit is None else circuit.paused_until
    return until if until is not None and until > now else None


_failing = select(
    func.count(), func.count(endpoints.c.paused_until)).where(endpoints.c.standing == states.FAILING)


def failing(view: Connection) -> tuple[int, int]:
    """How many endpoints failed last, and how many of them are paused."""
    all_of_them, are_paused = view.execute(_failing).one()
    return all_of_them, are_paused


_add = insert(endpoints)
_change = update(endpoints).where(endpoints.c.id == bindparam("endpoint")).values(
    standing=bindparam("becomes"), failures=bindparam("in_a_row"), failing_since=bindparam("since"),
    paused_until=bindparam("until"), noted_at=bindparam("now"))


def note(
    tx: Connection, endpoint: str, host: str, answered: bool, seconds: float, chance: float, now: datetime,
) -> Circuit:
    """Writes down how an attempt that took so long went, and returns the endpoint's standing now. The caller holds the
    host's deliveries."""
    before = find(tx, endpoint)
    return note_after(tx, before, endpoint, host, answered, seconds, chance, now)


def note_after(
    tx: Connection, before: Circuit | None, endpoint: str, host: str, answered: bool, seconds: float, chance: float,
    now: datetime,
) -> Circuit:
    """As `note`, where the endpoint's standing before is known, to whom holds the host."""
    if not answered:
        after = _failed(endpoint, host, before, chance, now)
    else:
        after = Circuit(endpoint, host, states.SLOW if seconds > SLOW_SECONDS else states.WELL, 0, None, None, now)
    if before is None:
        tx.execute(_add, asdict(after))
    elif replace(before, noted_at=now) != after:
        tx.execute(_change, {
            "endpoint": endpoint, "becomes": after.standing, "in_a_row": after.failures, "since": after.failing_since,
            "until": after.paused_until, "now": now})
    _tell(before, after)
    return after


def _failed(endpoint: str, host: str, before: Circuit | None, chance: float, now: datetime) -> Circuit:
    failures = 1 + (0 if before is None else before.failures)
    since = now if before is None or before.failing_since is None else before.failing_since
    failing_seconds = (now - since).total_seconds()
    pause = None
    if failures >= FAILURES_IN_A_ROW and failing_seconds >= FAILING_SECONDS:
        pause = now + timedelta(seconds=backoff.pause_seconds(failing_seconds, chance))
    return Circuit(endpoint, host, states.FAILING, failures, since, pause, now)


def _tell(before: Circuit | None, after: Circuit) -> None:
    was = before is not None and before.paused_until is not None
    if after.paused_until is not None and not was:
        log.warning("endpoint paused: it has failed for long", extra={
            "host": after.host, "endpoint": after.id, "failures": after.failures,
            "failing_since": isoformat(after.failing_since or after.paused_until)})
    elif was and after.standing != states.FAILING:
        log.info("endpoint answers again", extra={"host": after.host, "endpoint": after.id})


_resume = update(endpoints).where(endpoints.c.id == bindparam("endpoint")).values(paused_until=None)


def resume(tx: Connection, endpoint: str) -> None:
    """Ends an endpoint's pause: its next attempt is made when it is due, and if that fails there is another pause."""
    tx.execute(_resume, {"endpoint": endpoint})
