"""Which generation has a client's key: a request that is sent again is led to it instead of running twice.

A key is taken before the request's first wait and is undecided until its generation runs; who asks meanwhile waits for that. A
request that is refused gives it back, and so does a generation that failed for good: it stored nothing, and may be tried again
under the same key. Otherwise, also when it can be resumed, the key is held for as long as the generation can be read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import RequestKey
from ryzanstein.router.telemetry import RouterTelemetry

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A generation that has a key, at whatever router. `begun`: it is on record, so that it can be attached to."""

    generation_id: str
    body: bytes
    begun: bool


class SharedKeys(Protocol):
    """The keys of all routers. Neither method waits long."""

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """None: the generation has it now; it lasts no longer than `lasts_s`. Otherwise who has it. UNAVAILABLE when that
        cannot be told: perhaps the generation has it, until it is freed."""
        ...

    async def free(self, key: RequestKey, generation_id: str) -> None:
        """Gives it back, where it is still this generation's."""
        ...


class UnsharedKeys:
    """Of a router that shares nothing."""

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        return None

    async def free(self, key: RequestKey, generation_id: str) -> None: ...


@dataclass(eq=False, slots=True)
class _Holding:
    """`decided` is set when the generation runs, or does not have the key any more."""

    key: RequestKey
    generation_id: str
    begun: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class IdempotencyKeys:
    """The keys of this router's generations. As many at most as there are generations that enter, run or can be read."""

    def __init__(self, shared: SharedKeys, telemetry: RouterTelemetry) -> None:
        self._shared = shared
        self._telemetry = telemetry
        self._holdings: dict[str, _Holding] = {}
        self._by_generation: dict[str, _Holding] = {}
        self._freeing: set[asyncio.Task[None]] = set()

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> str:
        """The id of the generation that has the key: this one, whose fate is to be told by `begun` or `free`, or the one to
        attach to. FAILED_PRECONDITION IDEMPOTENCY_MISMATCH when it has another body, UNAVAILABLE when other routers' keys
        cannot be known: the request would run unprotected."""
        while (holding := self._holdings.get(key.name)) is not None:
            if holding.begun:
                self._check(holding.key.body, key)
                return self._attached(holding.generation_id)
            await holding.decided.wait()  # one that is being given back is anybody's
        self._hold(_Holding(key, generation_id))
        try:
            holder = await self._elsewhere(key, generation_id, lasts_s)
        except BaseException as error:
            if isinstance(error, RyzansteinError) and error.code is Code.UNAVAILABLE:
                self._telemetry.keyed_requests.labels("unavailable").inc()
            self.free(generation_id)
            raise
        if holder is not None:
            self.passed_on(generation_id)
            return self._attached(holder.generation_id)
        self._telemetry.keyed_requests.labels("begun").inc()
        return generation_id

    def begun(self, generation_id: str) -> None:
        """It runs. Who waited for that may attach."""
        if (holding := self._by_generation.get(generation_id)) is not None:
            holding.begun = True
            holding.decided.set()

    def adopted(self, key: RequestKey, generation_id: str) -> None:
        """This router goes on with a generation of another one."""
        if key.name not in self._holdings:
            self._hold(_Holding(key, generation_id))
            self.begun(generation_id)

    def passed_on(self, generation_id: str) -> None:
        """The key is another router's to keep."""
        if (holding := self._by_generation.get(generation_id)) is not None:
            self._drop(holding)

    def free(self, generation_id: str) -> None:
        """The generation was refused, has failed for good, or cannot be read any more. Who asks here meanwhile waits until
        every router knows."""
        holding = self._by_generation.pop(generation_id, None)
        if holding is not None:
            holding.begun = False
            holding.decided.clear()
            task = self._telemetry.background.once("key_release", self._free(holding))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def close(self) -> None:
        """Waits for what is being given back."""
        await asyncio.gather(*self._freeing, return_exceptions=True)

    async def _elsewhere(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """Another router's generation; waits for one whose fate is undecided. It is decided, or given up, within seconds."""
        while (holder := await self._shared.claim(key, generation_id, lasts_s)) is not None:
            self._check(holder.body, key)
            if holder.begun:
                return holder
            await asyncio.sleep(_LOOK_S)
        return None

    async def _free(self, holding: _Holding) -> None:
        try:
            await self._shared.free(holding.key, holding.generation_id)
        finally:
            self._drop(holding)

    def _hold(self, holding: _Holding) -> None:
        self._holdings[holding.key.name] = self._by_generation[holding.generation_id] = holding

    def _drop(self, holding: _Holding) -> None:
        self._by_generation.pop(holding.generation_id, None)
        if self._holdings.get(holding.key.name) is holding:
            del self._holdings[holding.key.name]
        holding.decided.set()

    def _attached(self, generation_id: str) -> str:
        self._telemetry.keyed_requests.labels("attached").inc()
        return generation_id

    def _check(self, body: bytes, key: RequestKey) -> None:
        if body != key.body:
            self._telemetry.keyed_requests.labels("mismatch").inc()
            message = "this idempotency key was used for another request; send a new key with a new request"
            raise errors.failed_precondition("IDEMPOTENCY_MISMATCH", message)
