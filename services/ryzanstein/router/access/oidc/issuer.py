"""The keys of an issuer of tokens, fetched beside requests and kept while the issuer is away."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping

import structlog

from ryzanstein.router.access.oidc.provider import Provider, ProviderError, SigningKey
from ryzanstein.router.access.telemetry import KeyMetrics

log = structlog.get_logger(__name__)

SOURCE = "oidc"
START_S = 5.0
REFRESH_S = 600.0
LEAST_BETWEEN_S = 30.0
MAX_AGE_S = 24 * 3600.0


class IssuerKeys:
    """The keys by which tokens are verified. Start `run` as a task.

    They are fetched every ten minutes, and at once for a token with an id that is not known: at most
    every 30 s, however many such tokens come. The last keys are trusted for a day.
    """

    def __init__(self, provider: Provider, metrics: KeyMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._provider, self._metrics, self._clock = provider, metrics, clock
        self._fetched_at = self._tried_at = -math.inf
        self._wanted = asyncio.Event()
        self._fault = ""
        self.keys: Mapping[str, SigningKey] = {}
        metrics.measure(SOURCE, lambda: self.age_s)

    @property
    def age_s(self) -> float:
        return self._clock() - self._fetched_at

    @property
    def are_trusted(self) -> bool:
        return self.age_s <= MAX_AGE_S

    def want(self) -> None:
        """Asks for other keys: a token names one that is not known."""
        self._wanted.set()

    async def run(self) -> None:
        """Fetches the keys for ever. The first time is at once, unless `start` was called before."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._tried_at + self._pause_s() - self._clock())):
                    await self._wanted.wait()
            await asyncio.sleep(max(0.0, self._tried_at + LEAST_BETWEEN_S - self._clock()))
            self._wanted.clear()
            await self.fetch()

    async def start(self) -> None:
        """Fetches the keys for the first time. A provider that answers late holds no router up: `run` tries again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self.fetch()

    async def fetch(self) -> None:
        """Fetches the keys once. Where that fails, the last ones stay."""
        self._tried_at = self._clock()
        try:
            keys = await asyncio.to_thread(self._provider.keys)
        except ProviderError as error:
            self._failed(str(error))
            return
        self._fetched_at = self._clock()
        if keys.keys() != self.keys.keys() or self._fault:
            log.info("keys of tokens fetched", keys=len(keys))
        self._fault = ""
        self.keys = keys
        self._metrics.loaded(SOURCE, len(keys))

    def _pause_s(self) -> float:
        return REFRESH_S if self.keys and not self._fault else LEAST_BETWEEN_S

    def _failed(self, fault: str) -> None:
        self._metrics.failed(SOURCE)
        if fault != self._fault:
            self._fault = fault
            log.error("keys of tokens cannot be fetched, the last ones stay", error=fault)
