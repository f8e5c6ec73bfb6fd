"""The built-in kind `primes`: counts the primes up to n with a segmented sieve of Eratosthenes."""
from __future__ import annotations

from math import isqrt
from typing import Any

from pydantic import BaseModel, Field

from app.kinds import Job, kind

_SEGMENT = 1 << 20  # odd numbers a segment: its bytes stay in the processor's cache


class Primes(BaseModel):
    """How far to count."""

    n: int = Field(ge=0, le=1_000_000_000, description="counts the primes up to and including n")


@kind("primes", Primes)
def primes(input: Primes, job: Job) -> dict[str, Any]:
    """`{"n": n, "count": the number of primes <= n}`; progress in numbers sieved."""
    return {"n": input.n, "count": count(input.n, job)}


def count(n: int, job: Job) -> int:
    """The prime-counting function of n; stops early, with what it has, when the attempt is no longer wanted."""
    if n < 2:
        return 0
    base = _odd_primes(isqrt(n))
    odds = (n + 1) // 2  # index i stands for 2 i + 1; index 0, the number 1, stands in for the prime 2
    found = 0
    for low in range(0, odds, _SEGMENT):
        if job.cancelled():
            break
        high = min(low + _SEGMENT, odds)
        found += _count_segment(low, high, base)
        job.progress(min(2 * high, n), n)
    return found


def _count_segment(low: int, high: int, base: list[int]) -> int:
    size = high - low
    sieve = bytearray(b"\x01") * size
    for prime in base:
        first = (prime * prime) // 2
        if first >= high:
            break
        if first < low:
            first += -(-(low - first) // prime) * prime
        if first < high:
            sieve[first - low::prime] = bytes(len(range(first - low, size, prime)))
    return sieve.count(1)


def _odd_primes(limit: int) -> list[int]:
    sieve = bytearray(b"\x01") * (limit // 2 + 1)
    for i in range(1, isqrt(limit) // 2 + 1):
        if sieve[i]:
            sieve[2 * i * (i + 1)::2 * i + 1] = bytes(len(range(2 * i * (i + 1), len(sieve), 2 * i + 1)))
    return [2 * i + 1 for i in range(1, len(sieve)) if sieve[i] and 2 * i + 1 <= limit]
