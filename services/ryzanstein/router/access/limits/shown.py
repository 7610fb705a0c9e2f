"""What clients are shown of their limits: the headers that OpenAI's clients know."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ryzanstein.router.access.limits.bounds import LimitBounds, TenantLevel
from ryzanstein.router.access.limits.gcra import SECOND_US, Rate

NO_HEADERS: Mapping[str, str] = {}


def headers(bounds: LimitBounds, level: TenantLevel) -> Mapping[str, str]:
    """Returns `x-ratelimit-…` of the rates that a tenant has."""
    shown: dict[str, str] = {}
    if bounds.requests is not None:
        shown |= _of_rate("requests", bounds.requests, level.requests_full_in_us)
    if bounds.tokens is not None:
        shown |= _of_rate("tokens", bounds.tokens, level.tokens_full_in_us)
    return shown


def duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it: `12ms`, `6s`, `6m0s`, `1h0m0s`. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, whole = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes or hours else "") + f"{whole}s"


def _of_rate(name: str, rate: Rate, full_in_us: float) -> Mapping[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(rate.burst),
        f"x-ratelimit-remaining-{name}": str(rate.remaining(full_in_us)),
        f"x-ratelimit-reset-{name}": duration(full_in_us / SECOND_US),
    }
