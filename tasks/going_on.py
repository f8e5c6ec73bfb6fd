"""Going on: an attempt that was answered well is recorded, and the next of its endpoint is claimed in its place; for
several threads at once, in one transaction and one round trip to the view."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from app import backoff, circuits, db, deliveries, metrics, slices, states, status, turns
from app.config import settings
from app.deliveries import Attempt, Delivery
from app.jobs import Job
from app.slices import Claimed
from tasks.gathering import Gathering

# How long a thread goes on with an endpoint before whoever is in turn gets its place: much less than one answer may
# take that is not slow, and long enough that the message which begins a slice costs little.
SECONDS = 0.25
_STEP_BACK_SECONDS = 1.0  # what cannot be sent now comes back so much later


@dataclass(frozen=True)
class Ended:
    """An attempt that was answered well, by the clock of whoever made it. `begins`: it is the first of its slice."""

    claimed: Claimed
    tried: Attempt
    begins: bool
    now: datetime
    lease: timedelta


Outcome = tuple[Delivery | None, Claimed | None]


def record(ended: Ended) -> Outcome:
    """Writes how the attempt ended, and shows it; and what is to be sent now, if anything is. None, and nothing
    written, when the attempt is no longer this sender's."""
    return _gathered.put(ended.claimed.delivery.endpoint, ended)


def _write(all_of_them: Sequence[Ended]) -> list[Outcome]:
    first = all_of_them[0]
    endpoint, host = first.claimed.delivery.endpoint, first.claimed.delivery.host
    with db.transaction() as tx:
        after = _record(tx, all_of_them)
        ours = [ended for ended in all_of_them if ended.claimed.delivery.id in after]
        if not ours:
            return [(None, None)] * len(all_of_them)
        longest = max(ended.tried.duration_seconds for ended in ours)
        circuits.note(tx, endpoint, host, True, longest, random.random(), first.now)
        following = slices.claim_next(tx, endpoint, len(ours), first.now, first.now + first.lease)
        wake = False
        if len(following) < len(ours) or any(ended.begins for ended in ours):
            wake = turns.stage_next(tx, host, settings().callback_per_host, first.now)
        told = slices.touch(tx, [ended.claimed.job for ended in ours])
    for ended in ours:
        metrics.delivered(states.DELIVERED, ended.tried.duration_seconds or None)
    shown = status.write_all([
        *((told[ended.claimed.job.id], after[ended.claimed.delivery.id]) for ended in ours),
        *((claimed.job, claimed.delivery) for claimed in following)], wake)
    sent = iter([claimed for claimed in following if _may_be_sent(claimed, shown, first.now)])
    return [(found := after.get(ended.claimed.delivery.id), None if found is None else next(sent, None))
            for ended in all_of_them]


def _record(tx: Connection, all_of_them: Sequence[Ended]) -> dict[str, Delivery]:
    """Those that were still their senders', by their ids."""
    turns.hold(tx, all_of_them[0].claimed.delivery.host)
    after = {}
    for ended in all_of_them:
        held = deliveries.end(tx, ended.claimed.delivery, ended.tried, states.DELIVERED, None, ended.now)
        if held is not None:
            after[held.id] = held
    if after:
        deliveries.append(tx, *(ended.tried for ended in all_of_them if ended.tried.delivery_id in after))
    return after


def _may_be_sent(claimed: Claimed, shown: bool, now: datetime) -> bool:
    """Whether whoever is called back reads the final state; otherwise it steps back, and has used no attempt."""
    if shown or has_been_forgotten(claimed.job, now):
        return True
    later = now + timedelta(seconds=backoff.jittered(_STEP_BACK_SECONDS, random.random()))
    with db.transaction() as tx:
        slices.release(tx, claimed.delivery, later, now)
    return False


def has_been_forgotten(job: Job, now: datetime) -> bool:
    """Whether the view has had the time to forget the state before the final one."""
    assert job.finished_at is not None
    return now - job.finished_at > timedelta(seconds=status.UNFINISHED_TTL_SECONDS)


_gathered: Gathering[Ended, Outcome] = Gathering(_write)
