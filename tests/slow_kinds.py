"""Kinds that take their time, for tests with real workers."""
from __future__ import annotations

import contextlib
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


@kind("trace", Nap, max_attempts=25)
def trace(input: Nap, job: Job) -> dict[str, int]:
    """Writes down that this attempt began and that it ended; a line is written at once or not at all."""
    _append(os.environ["TRACE_LOG"], f"{job.id} {job.attempt}\n")
    time.sleep(input.seconds)
    _append(os.environ["TRACE_LOG"] + ".ended", f"{job.id} {job.attempt}\n")
    return {"attempt": job.attempt}


kind("once", Nap, max_attempts=1)(trace)


@kind("held", Nap)
def held(input: Nap, job: Job) -> dict[str, int]:
    """As `trace`, but ends once TRACE_LOG.enough is there; so many seconds are only its limit."""
    _append(os.environ["TRACE_LOG"], f"{job.id} {job.attempt}\n")
    until = time.monotonic() + input.seconds
    while time.monotonic() < until and not os.path.exists(os.environ["TRACE_LOG"] + ".enough"):
        time.sleep(0.05)
    return {"attempt": job.attempt}


def _append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@kind("deaf", Nap, max_attempts=1, time_limit=1)
def deaf(input: Nap, job: Job) -> None:
    """Sleeps on when it is told that its time is over."""
    until = time.monotonic() + input.seconds
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(until - time.monotonic())


kind("stone", Nap)(deaf)


@kind("heedful", Nap)
def heedful(input: Nap, job: Job) -> dict[str, int]:
    """Sleeps until it is told that nobody wants it any more."""
    until = time.monotonic() + input.seconds
    while time.monotonic() < until and not job.cancelled():
        time.sleep(0.05)
    return {"attempt": job.attempt}


class Nothing(BaseModel):
    pass


MOTLEY = {
    "é": ["😀", "\u2028\u2029", "\\ / \" \x7f\t", "", "ﬀ"], "floats": [1.0, -0.0, 1e22, 1e-7, 0.1, 5e-324, 1.5e300],
    "whole": [0, -1, 2**53 + 1, 10**30], "empty": [{}, [], None, True, False], "1.0": {"b": 1, "a": {"": [[]]}},
}


@kind("motley", Nothing)
def motley(input: Nothing, job: Job) -> dict[str, object]:
    """Its result is all that can be spelt in more than one way."""
    return MOTLEY


@kind("unlucky", Nothing, max_attempts=1)
def unlucky(input: Nothing, job: Job) -> None:
    """Fails, and says so in more than ASCII."""
    raise LookupError("é 😀 \u2028 \"1.0\" \\ </script>")


@kind("glutton", Nothing, max_attempts=1)
def glutton(input: Nothing, job: Job) -> None:
    """Wants more memory than there is."""
    bytearray(2**62)


@kind("suicide", Nothing, max_attempts=2)
def suicide(input: Nothing, job: Job) -> None:
    """Kills its own process."""
    os.kill(os.getpid(), signal.SIGKILL)
