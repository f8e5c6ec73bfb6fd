"""How often an owner may ask (RATE_LIMIT), counted in Redis for all processes. Without Redis nobody is refused."""
from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING

from flask import g, request
from redis import ConnectionPool

from app import config, redis_client
from app.api.problems import Problem
from app.api.tokens import is_open

if TYPE_CHECKING:  # else only where there is a limit
    from limits import RateLimitItem
    from limits.strategies import SlidingWindowCounterRateLimiter

_SCRAPE = "metrics.scrape"  # whoever watches must see also when an owner asks too much


@functools.lru_cache(maxsize=2)
def _limiter(connections: ConnectionPool) -> SlidingWindowCounterRateLimiter:
    from limits.storage import RedisStorage
    from limits.strategies import SlidingWindowCounterRateLimiter

    return SlidingWindowCounterRateLimiter(RedisStorage(config.redis_url(), connections))


@functools.lru_cache(maxsize=2)
def _limits(text: str) -> list[RateLimitItem]:
    from limits import parse_many

    return parse_many(text)


def require() -> None:
    """Before each request, after its owner is known. Raises the problem `rate-limited`, with when to come back."""
    limits = config.settings().rate_limit
    if limits is None or is_open() or request.endpoint == _SCRAPE or redis_client.away():
        return
    with redis_client.best_effort("rate limit"):
        limiter = _limiter(redis_client.client().connection_pool)
        for limit in _limits(limits):
            if not limiter.hit(limit, g.owner):
                again_at = limiter.get_window_stats(limit, g.owner).reset_time
                seconds = max(1, math.ceil(again_at - time.time()))
                raise Problem("rate-limited", f"more than {limit}", headers={"Retry-After": str(seconds)})
