"""After an outage of ours, retries that fell due meanwhile are published at one moment, but do not arrive in one."""
from __future__ import annotations

from datetime import datetime, timedelta

from app import backoff, db, deliveries, outbox, states, turns
from app.deliveries import Delivery


def step_back(known: Delivery, chance: float, now: datetime) -> bool:
    """Whether this due delivery waits a little longer, once and at no cost of an attempt, because its message was
    published late. A first attempt is news, and is never held back. `chance` is 0 to 1."""
    if known.attempts == 0 or known.next_attempt_at is None:
        return False
    with db.reading() as view:
        late = outbox.late_seconds(view, states.DELIVER_WEBHOOK, known.id, known.next_attempt_at, now)
    wait = backoff.spread_seconds(late, chance)
    if wait == 0:
        return False
    with db.transaction() as tx:
        turns.hold(tx, known.host)
        latest = deliveries.find(tx, known.id)
        if latest is not None and latest.next_attempt_at == known.next_attempt_at:  # nobody else makes it now
            outbox.settle(tx, states.DELIVER_WEBHOOK, known.id)  # a row made after the due moment is not late again
            turns.stage(tx, known.id, now + timedelta(seconds=wait), now)
    return True
