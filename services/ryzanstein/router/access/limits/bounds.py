"""The limits of a tenant as they are checked: which there are, and what a check answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.router.access.limits.gcra import SECOND_US, Rate


class LimitKind(IntEnum):
    """What a request was refused for. The scripts return the numbers."""

    NONE = 0
    REQUESTS_PER_SECOND = 1
    TOKENS_PER_MINUTE = 2
    CONCURRENT = 3
    TOKENS_PER_MONTH = 4

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """The limits that are checked when a request comes; None: no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent: int | None = None
    month: int | None = None

    def share(self, of: int) -> LimitBounds:
        """Returns what one of so many routers gives out alone. The month stays whole: its count is shared later."""
        if of <= 1:
            return self
        return replace(
            self,
            requests=None if self.requests is None else self.requests.share(of),
            tokens=None if self.tokens is None else self.tokens.share(of),
            concurrent=None if self.concurrent is None else math.ceil(self.concurrent / of),
        )


UNBOUNDED = LimitBounds()
"""Of tenants without limits: the only value like it."""


@lru_cache(4096)
def bounds_of(limits: TenantLimits) -> LimitBounds:
    """Returns the limits as they are checked."""
    rate, tokens = limits.requests_per_second, limits.tokens_per_minute
    burst = limits.burst if limits.burst is not None else max(1, math.ceil(rate or 0))
    bounds = LimitBounds(
        None if rate is None else Rate(SECOND_US / rate, max(1, burst)),
        None if tokens is None else Rate(60 * SECOND_US / tokens, tokens),
        limits.concurrent,
        limits.tokens_per_month,
    )
    return UNBOUNDED if bounds == UNBOUNDED else bounds


@dataclass(frozen=True, slots=True)
class TenantLevel:
    """How full the buckets of a tenant are: when each is full, how many generations run, what the month has used."""

    requests_full_in_us: float = 0.0
    tokens_full_in_us: float = 0.0
    running: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class LimitAnswer:
    """What a check answers. `wait_us`: when to try again, for a rate."""

    refused: LimitKind
    wait_us: float
    level: TenantLevel
