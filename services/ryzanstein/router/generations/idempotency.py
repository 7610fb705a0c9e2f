"""Idempotency keys: a request that is sent again attaches to its generation and does not run twice.

A key is claimed before the request's first await and is undecided until its generation runs.
Requests with the same key wait for that decision. A refused request frees its key. So does a
generation that failed permanently: it stored nothing, and may be tried again under the same key.
Otherwise, also when the generation can be resumed, the key is held for as long as the generation
can be read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import RequestKey
from ryzanstein.router.telemetry import RouterTelemetry

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A generation that has a key, at any router.

    `begun` means that it is recorded, so that a client can attach to it.
    """

    generation_id: str
    body: bytes
    begun: bool


class SharedKeys(Protocol):
    """The keys of all routers. Neither method waits long."""

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """Claims a key for a generation, which runs for `lasts_s` at most.

        Returns None when the generation has the key now, otherwise its holder. Raises UNAVAILABLE
        when that is unknown: the generation may have the key, until it is freed.
        """
        ...

    async def free(self, key: RequestKey, generation_id: str) -> None:
        """Frees the key if it still belongs to this generation."""
        ...


class UnsharedKeys:
    """The keys of a router that shares none."""

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        return None

    async def free(self, key: RequestKey, generation_id: str) -> None: ...


@dataclass(eq=False, slots=True)
class _Holding:
    """A key and its generation.

    `decided` is set when the generation runs, or no longer has the key.
    """

    key: RequestKey
    generation_id: str
    begun: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class IdempotencyKeys:
    """The keys of this router's generations.

    There are at most as many as there are generations that enter, run or can be read.
    """

    def __init__(self, shared: SharedKeys, telemetry: RouterTelemetry) -> None:
        self._shared = shared
        self._telemetry = telemetry
        self._holdings: dict[str, _Holding] = {}
        self._by_generation: dict[str, _Holding] = {}
        self._freeing: set[asyncio.Task[None]] = set()

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> str:
        """Returns the id of the generation that has the key.

        If it is `generation_id`, the caller must report the outcome with `begun` or `free`. Any
        other id is of the generation to attach to. Cancelling a claim frees the key.

        Raises FAILED_PRECONDITION IDEMPOTENCY_MISMATCH when the key was used with another body, and
        UNAVAILABLE when the keys of other routers are unknown, because the request would run
        unprotected.
        """
        while (holding := self._holdings.get(key.name)) is not None:
            if holding.begun:
                self._check(holding.key.body, key)
                return self._attached(holding.generation_id)
            await holding.decided.wait()  # a key that is being freed may then be claimed
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
        """Marks a generation as running. Requests that waited for that may attach."""
        if (holding := self._by_generation.get(generation_id)) is not None:
            holding.begun = True
            holding.decided.set()

    def adopted(self, key: RequestKey, generation_id: str) -> None:
        """Holds the key of a generation that this router has taken over."""
        if key.name not in self._holdings:
            self._hold(_Holding(key, generation_id))
            self.begun(generation_id)

    def passed_on(self, generation_id: str) -> None:
        """Drops a key that another router holds now."""
        if (holding := self._by_generation.get(generation_id)) is not None:
            self._drop(holding)

    def free(self, generation_id: str) -> None:
        """Frees the key of a generation.

        The generation was refused, has failed permanently, or can no longer be read. Requests with
        the key wait here until every router knows.
        """
        holding = self._by_generation.pop(generation_id, None)
        if holding is not None:
            holding.begun = False
            holding.decided.clear()
            task = self._telemetry.background.once("key_release", self._free(holding))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def close(self) -> None:
        """Waits for keys that are being freed."""
        await asyncio.gather(*self._freeing, return_exceptions=True)

    async def _elsewhere(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """Returns another router's generation that has the key, or None.

        Waits for one that is undecided, which is decided or given up within seconds.
        """
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
