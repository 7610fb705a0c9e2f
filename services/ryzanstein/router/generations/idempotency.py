"""Idempotency keys: a request that is sent again attaches to its generation and does not run twice.

A key is claimed before the request's first await and is undecided until its generation runs.
Requests with the same key wait for that decision. Among routers an undecided claim holds for some
seconds only, because its router may have died: it is renewed while the request waits, and confirmed
before the generation is launched. A refused request frees its key. So does a
generation that failed permanently: it stored nothing, and may be tried again under the same key.
Otherwise, also when the generation can be resumed, the key is held for as long as the generation
can be read.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import RequestKey
from ryzanstein.router.telemetry import RouterTelemetry

_LOOK_S = 0.05


class KeyTakenError(Exception):
    """Another router's generation has the key: this one was undecided, or its router stood still, for too long."""

    def __init__(self, generation_id: str) -> None:
        super().__init__(generation_id)
        self.generation_id = generation_id


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A generation that has a key, at any router.

    `begun` means that it is recorded, so that a client can attach to it.
    """

    generation_id: str
    body: bytes
    begun: bool


class SharedKeys(Protocol):
    """The keys of all routers. Neither method waits long.

    `hold_s`: how long a claim holds whose generation is not recorded.
    """

    hold_s: float

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """Claims a key for a generation, which runs for `lasts_s` at most, or renews its claim.

        Returns None when the generation has the key now, otherwise its holder. Raises UNAVAILABLE
        when that is unknown: the generation may have the key, until it is freed.
        """
        ...

    async def free(self, key: RequestKey, generation_id: str) -> None:
        """Frees the key if it still belongs to this generation."""
        ...


class UnsharedKeys:
    """The keys of a router that shares none."""

    hold_s = math.inf

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        return None

    async def free(self, key: RequestKey, generation_id: str) -> None: ...


@dataclass(eq=False, slots=True)
class _Holding:
    """A key and its generation.

    `claimed_s` is when the last claim that succeeded was sent, in monotonic seconds. `decided` is set
    when the generation runs, or no longer has the key.
    """

    key: RequestKey
    generation_id: str
    lasts_s: float
    claimed_s: float = math.inf
    begun: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    renewal: asyncio.TimerHandle | None = None
    renewing: asyncio.Task[None] | None = None


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
        holding = _Holding(key, generation_id, lasts_s)
        self._hold(holding)
        try:
            holder = await self._elsewhere(holding)
        except BaseException as error:
            if isinstance(error, RyzansteinError) and error.code is Code.UNAVAILABLE:
                self._telemetry.keyed_requests.labels("unavailable").inc()
            self.free(generation_id)
            raise
        if holder is not None:
            self.passed_on(generation_id)
            return self._attached(holder.generation_id)
        self._telemetry.keyed_requests.labels("begun").inc()
        self._renew_later(holding)
        return generation_id

    async def confirm(self, generation_id: str) -> None:
        """Returns when the generation certainly has its key, if it has one, for as long as it takes to launch it.

        Raises KeyTakenError when another router's generation has the key by now, the errors of
        `claim` otherwise.
        """
        holding = self._by_generation.get(generation_id)
        if holding is None:
            return
        # Again after an answer that took so long that the claim may have ended since.
        while time.monotonic() - holding.claimed_s > self._shared.hold_s / 2:
            if (holder := await self._elsewhere(holding)) is not None:
                self.passed_on(generation_id)
                raise KeyTakenError(self._attached(holder.generation_id))

    def begun(self, generation_id: str) -> None:
        """Marks a generation as running. Requests that waited for that may attach."""
        if (holding := self._by_generation.get(generation_id)) is not None:
            holding.begun = True
            _end_renewal(holding)
            holding.decided.set()

    def adopted(self, key: RequestKey, generation_id: str) -> None:
        """Holds the key of a generation that this router has taken over."""
        if key.name not in self._holdings:
            self._hold(_Holding(key, generation_id, 0.0))
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
            _end_renewal(holding)
            holding.decided.clear()
            task = self._telemetry.background.once("key_release", self._free(holding))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def close(self) -> None:
        """Waits for keys that are being freed."""
        await asyncio.gather(*self._freeing, return_exceptions=True)

    async def _elsewhere(self, holding: _Holding) -> KeyHolder | None:
        """Returns another router's generation that has the key, or None: it is claimed for this one.

        Waits for one that is undecided.
        """
        while (holder := await self._claimed(holding)) is not None:
            self._check(holder.body, holding.key)
            if holder.begun:
                return holder
            await asyncio.sleep(_LOOK_S)
        return None

    async def _claimed(self, holding: _Holding) -> KeyHolder | None:
        sent_s = time.monotonic()
        holder = await self._shared.claim(holding.key, holding.generation_id, holding.lasts_s)
        if holder is None:
            holding.claimed_s = sent_s
        return holder

    def _renew_later(self, holding: _Holding) -> None:
        if self._shared.hold_s < math.inf:
            holding.renewal = asyncio.get_running_loop().call_later(self._shared.hold_s / 4, self._begin_renewal, holding)

    def _begin_renewal(self, holding: _Holding) -> None:
        holding.renewing = self._telemetry.background.once("key_renewal", self._renew(holding))

    async def _renew(self, holding: _Holding) -> None:
        """Renews an undecided claim. A failure, or a claim that was lost, is found by `confirm`."""
        with suppress(RyzansteinError):
            if await self._claimed(holding) is not None:
                return
        if self._by_generation.get(holding.generation_id) is holding and not holding.begun:
            self._renew_later(holding)

    async def _free(self, holding: _Holding) -> None:
        if holding.renewing is not None:  # it might claim the key after it was freed
            await asyncio.gather(holding.renewing, return_exceptions=True)
        try:
            await self._shared.free(holding.key, holding.generation_id)
        finally:
            self._drop(holding)

    def _hold(self, holding: _Holding) -> None:
        self._holdings[holding.key.name] = self._by_generation[holding.generation_id] = holding

    def _drop(self, holding: _Holding) -> None:
        _end_renewal(holding)
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


def _end_renewal(holding: _Holding) -> None:
    if holding.renewal is not None:
        holding.renewal.cancel()
