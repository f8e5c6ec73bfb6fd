"""Calling back again: `python -m app.redeliver --since 2h` says how many jobs' latest rounds of callbacks ended as
`exhausted` since then; with `--yes` each of them gets one more, as `POST /jobs/<id>/redeliver` would give it."""
from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from sqlalchemy.exc import SQLAlchemyError

from app import clock, db, rounds, states
from app.errors import UketsukeError
from app.rounds import Range

PER_SECOND = 25.0  # new rounds that begin: a hundred thousand take an hour, and other callbacks find room between them
_SHOWN = 10  # rows of the breakdown; hosts that failed most
_TELL_SECONDS = 5.0  # between two lines of progress
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class _Nonsense(UketsukeError):
    """An argument that cannot be understood, in one line."""


# --- what was asked for ---


def moment(text: str, now: datetime) -> tuple[datetime, bool]:
    """The moment that was meant (an age counts back from now), and whether it had to be taken for UTC. Raises
    ValueError and OverflowError."""
    if age := re.fullmatch(r"([0-9]+)([smhd])", text):
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])}), False
    meant = datetime.fromisoformat(text)
    naive = meant.tzinfo is None
    return (meant.replace(tzinfo=timezone.utc) if naive else meant.astimezone(timezone.utc)), naive


def _moment(option: str, text: str, now: datetime) -> datetime:
    try:
        meant, assumed = moment(text, now)
    except (ValueError, OverflowError):
        raise _Nonsense(f"{option}: {text!r} is no moment: 2026-11-29T18:00:00Z, 2026-11-29, 90m, 2h or 3d") from None
    if assumed:
        print(f"{option} {text} has no zone and is taken as UTC: {clock.isoformat(meant)}")
    return meant


def _states(text: str) -> tuple[str, ...]:
    asked = {word.strip() for word in text.split(",")}
    if not asked <= set(rounds.ENDED):
        raise _Nonsense(f"--status: {text!r} is not a list of {', '.join(rounds.ENDED)}")
    return tuple(state for state in rounds.ENDED if state in asked)


def _host(text: str) -> str:
    """As `deliveries.host_of` writes it."""
    name, _, port = text.rpartition(":")
    if not name or not text.isprintable() or not re.fullmatch("[0-9]{1,5}", port):
        raise _Nonsense(f"--host: {text!r} is not host:port, such as hooks.example:443")
    return f"{name.strip('[]').rstrip('.').lower()}:{int(port)}"


def _wanted(given: argparse.Namespace, now: datetime) -> Range:
    since = _moment("--since", given.since, now)
    until = now if given.until is None else _moment("--until", given.until, now)
    if since >= until:
        raise _Nonsense(f"--since {clock.isoformat(since)} is not before {clock.isoformat(until)}")
    if given.kind is not None and not given.kind.isprintable():
        raise _Nonsense(f"--kind: {given.kind!r} is no kind")
    if not 0.01 <= given.per_second <= 10_000:
        raise _Nonsense("--per-second: 0.01 to 10000")
    return Range(since, until, _states(given.status), None if given.host is None else _host(given.host), given.kind)


# --- looking, and doing ---


@dataclass(frozen=True)
class Count:
    """How many rounds a range holds, by state and host, and how many more belong to jobs that have expired."""

    rounds: Counter[tuple[str, str]]
    expired: int


def count(wanted: Range, now: datetime) -> Count:
    """Counts, and changes nothing."""
    found, expired = Counter[tuple[str, str]](), 0
    for known in rounds.ended(wanted):
        if known.has_expired(now):
            expired += 1
        else:
            found[known.state, known.host] += 1
    return Count(found, expired)


def ask_all(wanted: Range, per_second: float, total: int, done: Counter[str]) -> datetime:
    """One more round after each; counts in `done` what became of them. Their first attempts begin `per_second` a
    second, from now on: returns when the last one does."""
    begin = due = clock.now()
    tell_at = time.monotonic() + _TELL_SECONDS
    for known in rounds.ended(wanted):
        due_next = begin + timedelta(seconds=(done[rounds.ASKED] + random.random()) / per_second)
        became = rounds.ask(known, due_next)
        done[became] += 1
        due = due_next if became == rounds.ASKED else due
        if time.monotonic() >= tell_at:
            print(f"{done.total()} of {total}", flush=True)
            tell_at = time.monotonic() + _TELL_SECONDS
    return due


# --- the command ---


_EPILOG = """A moment is ISO 8601 with a zone (2026-11-29T18:00:00Z), a date, or an age (90m, 2h, 3d); without a zone it
is taken as UTC. Exit status: 0, counted, or done; 2, an argument is wrong or the database is away; 130, interrupted.
What was asked for before an interruption stays so, and is not asked for again when the command is repeated."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.redeliver", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--since", required=True, metavar="WHEN", help="rounds that ended then (the finished_at of the "
                        "delivery, not of the job), or later")
    parser.add_argument("--until", metavar="WHEN", help="and before then; now, if left out")
    parser.add_argument("--status", default=states.EXHAUSTED, metavar="STATUS[,STATUS]",
                        help=f"how they ended: {', '.join(rounds.ENDED)} (%(default)s)")
    parser.add_argument("--host", metavar="HOST:PORT", help="only callbacks to this one")
    parser.add_argument("--kind", help="only jobs of this kind")
    parser.add_argument("--per-second", type=float, default=PER_SECOND, metavar="N", help="how many of the new rounds "
                        "begin in a second (%(default)g), so that they overrun nobody")
    parser.add_argument("--yes", action="store_true", help="do it; otherwise they are only counted")
    return parser


def _print_count(wanted: Range, found: Count) -> None:
    print(f"jobs whose latest round ended as {' or '.join(wanted.states)} from {clock.isoformat(wanted.since)} to "
          f"{clock.isoformat(wanted.until)}: {found.rounds.total()}")
    rows = [(state, host, number) for (state, host), number in found.rounds.most_common(_SHOWN)]
    if len(rest := found.rounds) > _SHOWN:
        rows.append(("...", f"{len(rest) - _SHOWN} more", found.rounds.total() - sum(row[2] for row in rows)))
    width = max((len(row[1]) for row in rows), default=0)
    for state, host, number in rows:
        print(f"  {state:<9}  {host:<{width}}  {number:>7}")
    if found.expired:
        print(f"left alone, as they have expired: {found.expired}")


def _done(done: Counter[str]) -> str:
    left = [f"{done[what]} {what}" for what in (rounds.TOLD_ANEW, rounds.EXPIRED) if done[what]]
    return f"rounds asked for: {done[rounds.ASKED]}" + (f"; left alone: {', '.join(left)}" if left else "")


def _run(given: argparse.Namespace, done: Counter[str]) -> None:
    now = clock.now()
    wanted = _wanted(given, now)
    db.check_tables()
    found = count(wanted, now)
    _print_count(wanted, found)
    total = found.rounds.total()
    if not given.yes:
        spread = timedelta(seconds=round(total / given.per_second))
        print(f"Nothing was changed. --yes asks for one more round of each, spread over {spread}." if total else
              "Nothing to do.")
        return
    last = ask_all(wanted, given.per_second, total + found.expired, done)
    print(_done(done) + (f"; the last one begins {clock.isoformat(last)}" if done[rounds.ASKED] else ""))


def main() -> int:
    """0: counted, or done. 2: an argument is wrong, or the database is away. 130: interrupted."""
    given = _parser().parse_args()
    logging.getLogger("uketsuke").addHandler(logging.NullHandler())  # Redis may be away: nothing here needs it
    done: Counter[str] = Counter()
    try:
        _run(given, done)
    except (UketsukeError, SQLAlchemyError, OSError) as error:
        print(f"redeliver: {db.reason(error) if isinstance(error, SQLAlchemyError) else error}"
              + (f" ({_done(done)}, perhaps one more)" if done else ""), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"redeliver: interrupted ({_done(done)}, perhaps one more)", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
