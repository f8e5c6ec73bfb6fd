"""The nap of the other peers as a kind of ours: `JOB_MODULES=bench.peers.kinds`."""
from __future__ import annotations

from pydantic import BaseModel

from app.kinds import Job, kind
from bench.peers import work


class Nap(BaseModel):
    """Where it says that it has begun, and how long it takes."""

    file: str
    seconds: float


@kind("nap", Nap)
def nap(input: Nap, job: Job) -> dict[str, bool]:
    """Sleeps."""
    return work.nap(input.file, input.seconds)
