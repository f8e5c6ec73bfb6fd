"""The work of every peer's task: that of the kind `primes`, and a job that takes its time for the runs that kill."""
from __future__ import annotations

import time
from math import isqrt
from pathlib import Path


def primes(n: int) -> dict[str, int]:
    """How many primes there are up to n."""
    sieve = bytearray(b"\x00\x00") + bytearray(b"\x01") * max(0, n - 1)
    for i in range(2, isqrt(max(n, 0)) + 1):
        if sieve[i]:
            sieve[i * i::i] = bytes(len(range(i * i, n + 1, i)))
    return {"n": n, "count": sieve[:n + 1].count(1)}


def nap(file: str, seconds: float) -> dict[str, bool]:
    """Sleeps; the file gets a line for each time that this has begun."""
    with Path(file).open("a") as lines:
        lines.write("begun\n")
    time.sleep(seconds)
    return {"slept": True}
