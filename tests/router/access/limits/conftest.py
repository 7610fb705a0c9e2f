"""Allowances of routers that share a Redis server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits.allowance import SharedLimits, TenantAllowance
from ryzanstein.router.access.limits.books.redis import RedisLimits
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.limits.usage import UsageBook, UsageCount
from ryzanstein.storage.redis_client import redis_client


@dataclass
class LimitedRouter:
    """One router's allowance, with its metrics."""

    allowance: TenantAllowance
    registry: CollectorRegistry

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"ryzanstein_router_{name}", labels) or 0.0

    async def used(self, tenant: str = "acme") -> UsageCount:
        rows = await self.allowance.usage("", tenant)
        return rows[0].count if rows else UsageCount()


Starter = Callable[..., Awaitable[LimitedRouter]]


@pytest.fixture
async def start_limited() -> AsyncIterator[Starter]:
    """Starts allowances: over a Redis server if one is given, else over a book."""
    async with contextlib.AsyncExitStack() as stack:
        count = 0

        async def start(
            redis: Any = None, book: UsageBook | None = None, hold_s: float = 60.0, limits: TenantLimits | None = None
        ) -> LimitedRouter:
            nonlocal count
            count += 1
            shared: SharedLimits | None = None
            registry = CollectorRegistry()
            background = Background("router", registry)
            if redis is not None:
                book = shared = RedisLimits(redis_client(redis.url), "test:", f"router-{count}", background, hold_s=hold_s)
            assert book is not None
            allowance = TenantAllowance(
                book, LimitMetrics(registry), lambda _: limits or TenantLimits(), shared=shared, linger_s=0.002
            )
            await stack.enter_async_context(allowance.running(background))
            return LimitedRouter(allowance, registry)

        yield start
