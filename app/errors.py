"""What can go wrong, in the product's own words. Status codes are the business of `app.api.problems`."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


class UketsukeError(Exception):
    """Whatever this product raises on purpose."""


class WrongSetting(UketsukeError):
    """A setting that cannot be used; the message is one line for the person who starts the process."""


class WrongKind(UketsukeError):
    """A kind that cannot be registered; the message is one line for the person who starts the process."""


@dataclass(frozen=True)
class Flaw:
    """One thing wrong with an input: a JSON pointer as a URI fragment (RFC 6901 6) and what is wrong there."""

    pointer: str
    detail: str


class InvalidInput(UketsukeError):
    """Well-formed, but not what the resource takes."""

    def __init__(self, flaws: Sequence[Flaw]) -> None:
        super().__init__("; ".join(f"{flaw.pointer}: {flaw.detail}" for flaw in flaws))
        self.flaws = tuple(flaws)


class EndpointRefused(UketsukeError):
    """A callback address that this service will not connect to; the message says why."""


class NotFound(UketsukeError):
    """There is no such row, or it is another owner's."""


class Expired(UketsukeError):
    """The job finished, and its time to live is over. Carries what the tombstone keeps."""

    def __init__(self, job_id: str, kind: str, status: str, finished_at: datetime, expired_at: datetime) -> None:
        super().__init__(f"job {job_id} has expired")
        self.job_id = job_id
        self.kind = kind
        self.status = status
        self.finished_at = finished_at
        self.expired_at = expired_at


class Finished(UketsukeError):
    """The job has ended, so it cannot be cancelled."""


class Unfinished(UketsukeError):
    """The job has not ended, so there is nothing to tell yet."""


class NoCallback(UketsukeError):
    """The job was submitted without a callback address."""


class BacklogFull(UketsukeError):
    """There are too many unfinished jobs to take another one."""


class KeyReused(UketsukeError):
    """An idempotency key that already stands for a different request. `location` is that request's job."""

    def __init__(self, location: str) -> None:
        super().__init__(f"the key already stands for another request, answered with {location}")
        self.location = location
