"""For the benchmark's own parts, which run in the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Returns as soon as a condition holds; fails when it does not within the bound."""

    async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - conditions are anything a test can see
                await asyncio.sleep(0.005)

    return until
