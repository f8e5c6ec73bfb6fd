"""Going on: an attempt that was answered well is recorded, and the next of its endpoint is claimed in its place; for
several threads at once, in one transaction and one round trip to the view."""
from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from app import backoff, circuits, db, deliveries, metrics, slices, states, status, turns
from app.config import settings
from app.deliveries import Attempt, Delivery
from app.jobs import Job
from app.group_commit import GroupCommit
from app.slices import Claimed

# How long a thread goes on with an endpoint before whoever is in turn gets its place: much less than one answer may
# take that is not slow, and long enough that the message which begins a slice costs little.
SECONDS = 0.25
_STEP_BACK_SECONDS = 1.0  # what cannot be sent now comes back so much later


@dataclass(eq=False)
class Ended:
    """An attempt that was answered well, by the clock of whoever made it. `begins`: it is the first of its slice. Once
    it is recorded: `after`, the delivery as that left it, or None when the attempt was no longer this sender's; and
    `following`, what is to be sent now, if anything is."""

    claimed: Claimed
    tried: Attempt
    begins: bool
    now: datetime
    lease: timedelta
    after: Delivery | None = None
    told: Job | None = None
    following: Claimed | None = None
    wakes: bool = False


def record(ended: Ended) -> None:
    """Writes how the attempt ended, perhaps with others to its endpoint that end at the same time, and shows it."""
    _of(ended.claimed.delivery.endpoint).commit(ended)


@functools.lru_cache(maxsize=256)  # more endpoints than threads, and one that is forgotten in use commits by itself
def _of(endpoint: str) -> GroupCommit[Ended]:
    return GroupCommit(_write, _show)


def _write(tx: Connection, together: Sequence[Ended]) -> None:
    first = together[0]
    endpoint, host = first.claimed.delivery.endpoint, first.claimed.delivery.host
    ours = _record(tx, together)
    if not ours:
        return
    longest = max(ended.tried.duration_seconds for ended in ours)
    circuits.note(tx, endpoint, host, True, longest, random.random(), first.now)
    following = slices.claim_next(tx, endpoint, len(ours), first.now, first.now + first.lease)
    if len(following) < len(ours) or any(ended.begins for ended in ours):
        ours[0].wakes = turns.stage_next(tx, host, settings().callback_per_host, first.now)
    told = slices.touch(tx, [ended.claimed.job for ended in ours])
    for ended in ours:
        ended.told = told[ended.claimed.job.id]
    for ended, claimed in zip(ours, following):
        ended.following = claimed


def _show(together: Sequence[Ended]) -> None:
    ours = [ended for ended in together if ended.after is not None]
    going = [ended for ended in ours if ended.following is not None]
    for ended in ours:
        metrics.delivered(states.DELIVERED, ended.tried.duration_seconds or None)
    shown = status.write_all([
        *((ended.told, ended.after) for ended in ours if ended.told is not None),
        *((ended.following.job, ended.following.delivery) for ended in going if ended.following is not None)],
        wake=any(ended.wakes for ended in ours))
    for ended, is_shown in zip(going, shown[len(ours):]):
        if ended.following is not None and not _may_be_sent(ended.following, is_shown, ended.now):
            ended.following = None


def _record(tx: Connection, together: Sequence[Ended]) -> list[Ended]:
    """Those that were still their senders'."""
    turns.hold(tx, together[0].claimed.delivery.host)
    for ended in together:
        ended.wakes, ended.following = False, None  # it may have been written before, in vain
        ended.after = deliveries.end(tx, ended.claimed.delivery, ended.tried, states.DELIVERED, None, ended.now)
    ours = [ended for ended in together if ended.after is not None]
    if ours:
        deliveries.append(tx, *(ended.tried for ended in ours))
    return ours


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
