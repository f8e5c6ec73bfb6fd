"""When the next try is due: pure functions; chance and the present are arguments."""
from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from urllib3.exceptions import InvalidHeader
from urllib3.util.retry import Retry

JITTER = 0.2  # of each wait, either way, so that what failed together does not return together
MAX_RETRY_AFTER_SECONDS = 86_400.0
LATE_SECONDS = 10.0  # no busy relay publishes so late: it, the broker, the courier or beat was away
_SPREAD_SECONDS = 60.0  # what fell due within an outage of a minute or more arrives within a minute
_JOB_FIRST_SECONDS = 1.0  # and twice as long each time: three attempts, as by default, take three seconds
_JOB_LONGEST_SECONDS = 30.0  # so 25 attempts take ten minutes
_PAUSE_SHARE = 0.1  # of the time that an endpoint has been failing: who failed for ten minutes is asked each minute
_LONGEST_PAUSE_SECONDS = 3600.0  # reached after ten hours: who is back is called within the hour


def jittered(seconds: float, chance: float) -> float:
    """The wait with its jitter; `chance` is 0 to 1."""
    return seconds * (1 - JITTER + 2 * JITTER * chance)


def next_delivery_at(
    schedule: Sequence[int], attempt: int, chance: float, retry_after: float | None, now: datetime,
) -> datetime | None:
    """When a delivery whose attempt (counted from 1) just failed is tried again, None when the schedule is over.

    `schedule` holds the wait before each attempt, in seconds. A receiver's Retry-After never shortens a wait, and is
    lengthened by the jitter: many may have been told the same.
    """
    if attempt >= len(schedule):
        return None
    wait = jittered(schedule[attempt], chance)
    asked = min((retry_after or 0.0) * (1 + JITTER * chance), MAX_RETRY_AFTER_SECONDS)
    return now + timedelta(seconds=max(wait, asked))


def spread_seconds(late_seconds: float, chance: float) -> float:
    """How much longer a retry waits whose message was published so late: so that what fell due during an outage of ours
    does not arrive in one second. 0 when it is not late; `chance` is 0 to 1."""
    return 0.0 if late_seconds <= LATE_SECONDS else chance * min(late_seconds, _SPREAD_SECONDS)


def next_job_attempt_at(attempt: int, chance: float, now: datetime) -> datetime:
    """When a job whose attempt (counted from 1) ended in an exception is tried again: 1, 2, 4 ... 30 s later."""
    wait = min(_JOB_FIRST_SECONDS * 2 ** min(attempt - 1, 10), _JOB_LONGEST_SECONDS)
    return now + timedelta(seconds=jittered(wait, chance))


def pause_seconds(failing_seconds: float, chance: float) -> float:
    """How long an endpoint that has failed for so long is left alone before its next attempt."""
    return jittered(min(failing_seconds * _PAUSE_SHARE, _LONGEST_PAUSE_SECONDS), chance)


def retry_after_seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds from now (RFC 9110 10.2.3: seconds or a date), MAX_RETRY_AFTER_SECONDS at most;
    None when it says nothing."""
    if not header:
        return None
    try:
        return float(Retry(0, retry_after_max=int(MAX_RETRY_AFTER_SECONDS)).parse_retry_after(header))
    except (InvalidHeader, ValueError, OverflowError):
        return None
