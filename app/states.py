"""The closed vocabularies. The tables' CHECKs are made from them, so a word that is not here cannot be stored."""
from __future__ import annotations

QUEUED = "queued"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
JOB_STATUSES = (QUEUED, RUNNING, SUCCEEDED, FAILED)
FINAL = frozenset({SUCCEEDED, FAILED})

# What docs/architecture.md draws; each is one guarded statement of `app.jobs`.
JOB_MOVES = {
    QUEUED: frozenset({RUNNING, SUCCEEDED, FAILED}),
    RUNNING: frozenset({QUEUED, SUCCEEDED, FAILED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
}

CANCELLED = "cancelled"
ERROR_CODES = ("exception", "refused", "timeout", "crashed", "bad_result", CANCELLED)

WAITING = "waiting"
LEASED = "leased"
PUBLISHED = "published"
PARKED = "parked"
OUTBOX_STATES = (WAITING, LEASED, PUBLISHED, PARKED)

RUN_JOB = "run_job"
DELIVER_WEBHOOK = "deliver_webhook"
OUTBOX_TASKS = (RUN_JOB, DELIVER_WEBHOOK)

PENDING = "pending"
SENDING = "sending"
DELIVERED = "delivered"
EXHAUSTED = "exhausted"
GONE = "gone"
REFUSED = "refused"
DELIVERY_STATES = (PENDING, SENDING, DELIVERED, EXHAUSTED, GONE, REFUSED)
UNFINISHED_DELIVERIES = frozenset({PENDING, SENDING})

# How an endpoint answered last; one that has not been tried yet has no row.
WELL = "well"
SLOW = "slow"
FAILING = "failing"
STANDINGS = (WELL, SLOW, FAILING)
