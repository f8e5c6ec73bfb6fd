"""Rounds of callbacks that have ended, of all owners: to find those of a range, and to ask for one more after each."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Select, and_, exists, or_, select

from app import clock, db, interventions, retention, states
from app.errors import Expired, NotFound
from app.schema import deliveries, jobs

ENDED = tuple(state for state in states.DELIVERY_STATES if state not in states.UNFINISHED_DELIVERIES)
PAGE = 500  # rows at a time, each in a view of its own; a view that stays open holds up checkpoints and vacuums

ASKED, EXPIRED, TOLD_ANEW = "asked", "expired", "told anew"  # what became of a wish for one more round


@dataclass(frozen=True)
class Range:
    """Rounds that ended in these states at or after `since` and before `until`, to this host (`host:port`) and of this
    kind of job, if any."""

    since: datetime
    until: datetime
    states: tuple[str, ...]
    host: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Round:
    """A job's latest round, which has ended."""

    job_id: str
    owner: str
    expires_at: datetime
    id: str
    state: str
    host: str
    finished_at: datetime

    def has_expired(self, now: datetime) -> bool:
        """Whether the job's time is over, and the round is not kept to be asked for again."""
        return self.expires_at <= now and not retention.is_kept_for(self.state, self.finished_at, now)


_columns = [(jobs if field.name in ("owner", "expires_at") else deliveries).c[field.name] for field in fields(Round)]
_later = deliveries.alias("later")
_of_same_job = (_later.c.job_id == deliveries.c.job_id, or_(
    _later.c.created_at > deliveries.c.created_at,
    and_(_later.c.created_at == deliveries.c.created_at, _later.c.id > deliveries.c.id)))


def page(wanted: Range, after: str) -> Select[Any]:
    """The question for the next PAGE rounds, by their jobs' ids. Each job is met once: what is begun meanwhile, by
    whatever clock, is behind."""
    # All three begin there: a merge join of PostgreSQL reads each table from its beginning, once a page, otherwise.
    query = select(*_columns).join(jobs, jobs.c.id == deliveries.c.job_id).where(
        deliveries.c.job_id > after, jobs.c.id > after, ~exists().where(_later.c.job_id > after, *_of_same_job),
        deliveries.c.state.in_(wanted.states), deliveries.c.finished_at >= wanted.since,
        deliveries.c.finished_at < wanted.until)
    if wanted.host is not None:
        query = query.where(deliveries.c.host == wanted.host)
    if wanted.kind is not None:
        query = query.where(jobs.c.kind == wanted.kind)
    return query.order_by(deliveries.c.job_id).limit(PAGE)


def ended(wanted: Range) -> Iterator[Round]:
    """Jobs' latest rounds in this range, as they are when they are reached, in no more memory than a page takes."""
    after = ""
    while True:
        with db.reading() as view:
            found = [Round(*row) for row in view.execute(page(wanted, after))]
        yield from found
        if len(found) < PAGE:
            return
        after = found[-1].job_id


def ask(known: Round, first_attempt_at: datetime) -> str:
    """One more round after this one, in a transaction of its own; says what became of that."""
    try:
        begun = interventions.redeliver_after(known.id, known.owner, known.job_id, first_attempt_at, clock.now())
    except (Expired, NotFound):  # and pruned, perhaps
        return EXPIRED
    return TOLD_ANEW if begun is None else ASKED
