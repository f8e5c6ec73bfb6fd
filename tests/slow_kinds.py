"""Kinds that take their time, for tests with real workers."""
from __future__ import annotations

import os
import signal
import time

from pydantic import BaseModel, Field

from app.kinds import Job, kind


class Nap(BaseModel):
    seconds: float = Field(ge=0, le=60)


@kind("nap", Nap)
def nap(input: Nap, job: Job) -> dict[str, int]:
    """Sleeps for as long as it was told."""
    time.sleep(input.seconds)
    return {"attempt": job.attempt}


@kind("overtime", Nap, max_attempts=1, time_limit=1)
def overtime(input: Nap, job: Job) -> None:
    """Sleeps beyond its limit."""
    time.sleep(input.seconds)


class Nothing(BaseModel):
    pass


@kind("suicide", Nothing, max_attempts=2)
def suicide(input: Nothing, job: Job) -> None:
    """Kills its own process."""
    os.kill(os.getpid(), signal.SIGKILL)
