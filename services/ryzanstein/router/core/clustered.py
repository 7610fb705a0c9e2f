"""The core of a router whose generations outlive it, and that continues those of lost routers.

A generation that is not here is looked up in the journal. The router first asks its owner: while
the owner lives, its log is the newest. When the owner is lost, the generation is taken over.
Exactly one router succeeds; the others find the new owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from ryzanstein import errors
from ryzanstein.backoff import Backoff
from ryzanstein.generation.tokens import GenerationEvent
from ryzanstein.router.core.local import LocalCore
from ryzanstein.router.core.parts import CoreParts
from ryzanstein.router.core.peers import MOVED, RESTARTED, TOO_OLD, OwnerLostError, PassedReader, Peers, moved
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.journal.encoding import check_readable
from ryzanstein.router.journal.journal import (
    LEASE_KEEPER,
    Head,
    Journal,
    JournalRecord,
    JournalUnavailableError,
    Owner,
    keep_lease,
)
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage
from ryzanstein.router.journal.recorder import JournalRecorder

log = structlog.get_logger(__name__)

MAX_ID_CHARS = 64
_MAX_MOVES = 16
_MOVE_PAUSE_S = 0.02
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Lost:
    """An owner that did not answer for a generation."""

    head: Head
    cause: str


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What the routers of a cluster share, and how this one takes part.

    `owner_id` names this router. `recorder` writes to `journal`. A lease lasts for `lease_s`.
    """

    journal: Journal
    recorder: JournalRecorder
    peers: Peers
    owner_id: str
    lease_s: float
    metrics: JournalMetrics
    outage: JournalOutage


class ClusteredCore(LocalCore):
    """A core with a journal. `start` it when the gRPC face listens."""

    def __init__(self, parts: CoreParts, cluster: ClusterParts) -> None:
        super().__init__(replace(parts, recorder=cluster.recorder, others=cluster.peers))
        self._cluster = cluster
        self._background = parts.telemetry.background
        self._owner = Owner(cluster.owner_id, "")
        self._lease: asyncio.Task[None] | None = None
        self._taking: dict[str, asyncio.Task[Generation | None]] = {}

    def start(self, address: str, public: str = "") -> None:
        """Makes this router known to other routers at `address`, and as one that clients reach at `public`."""
        self._owner = owner = Owner(self._cluster.owner_id, address, public)
        self._cluster.recorder.start(owner, self._lifecycle.moved)
        self._lease = self._keep_lease(owner)

    async def drain(self) -> None:
        """Tells other routers that this one accepts no calls but still answers.

        Without it a refused connection would mean that the router is gone, and the sessions in
        which it is still answering would be free.
        """
        if self._lease is None:
            return
        draining = replace(self._owner, address="")
        self._lease.cancel()
        self._lease = self._keep_lease(draining)
        try:
            await self._cluster.journal.renew(draining)
        except Exception as error:
            # Whatever the store does, the drain goes on. The lease keeper tries again.
            log.warning("drain not announced", error=str(error))

    async def routers(self) -> list[Owner]:
        """Returns the routers that share the journal. Raises JOURNAL_UNAVAILABLE."""
        try:
            found = await self._cluster.journal.owners()
        except JournalUnavailableError as error:
            self._cluster.outage.begin(error)
            raise errors.unavailable(
                "JOURNAL_UNAVAILABLE", "the routers are not known while the journal is unavailable"
            ) from error
        return list({each.router_id: each for each in reversed(found)}.values())

    def _keep_lease(self, owner: Owner) -> asyncio.Task[None]:
        return self._background.supervise(
            LEASE_KEEPER,
            partial(keep_lease, self._cluster.journal, owner, self._cluster.lease_s, self._cluster.outage),
            Backoff(longest_s=self._cluster.lease_s / 3),
            on_end=lambda _: self._cluster.outage.broke(LEASE_KEEPER),
        )

    async def close(self) -> None:
        """Closes the core and gives up the lease. Other routers may continue what still runs."""
        await super().close()
        if self._lease is not None:
            self._lease.cancel()
            await asyncio.gather(self._lease, *self._taking.values(), return_exceptions=True)
            try:
                await self._cluster.journal.resign(self._owner)
            except Exception as error:
                log.warning("lease not released", error=str(error))

    def follow(
        self,
        generation_id: str,
        from_index: Mapping[int, int] | None = None,
        owner_id: str = "",
        *,
        whole: bool = False,
        tenant: str = "",
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `Core.follow`."""
        if self.find(generation_id) is not None:
            return super().follow(generation_id, from_index, whole=whole, tenant=tenant)
        return self._follow_anywhere(generation_id, PassedReader(from_index or {}), owner_id, whole, tenant)

    async def cancel(self, generation_id: str, owner_id: str = "", *, tenant: str = "") -> None:
        """See `Core.cancel`."""
        lost: _Lost | None = None
        for _ in range(_MAX_MOVES):
            place = await self._locate(generation_id, lost, owner_id)
            if place is None:
                await super().cancel(generation_id, tenant=tenant)
                return
            try:
                self._cluster.metrics.relayed.inc()
                await self._cluster.peers.cancel(place, generation_id, tenant=tenant)
                return
            except OwnerLostError as error:
                lost = _Lost(place, error.cause)
        raise moved(generation_id)

    async def interrupt_for_peer(self, generation_id: str, owner_id: str) -> bool:
        """Interrupts a generation for another router that addresses the owner `owner_id`.

        See `LocalCore.interrupt`. Raises GENERATION_MOVED when this router is not that owner.
        """
        if owner_id != self._cluster.owner_id:
            raise moved(generation_id)
        return await self.interrupt(generation_id)

    def holds_session_for_peer(self, session_id: str, owner_id: str) -> bool:
        """Returns whether this router speaks in the session or has a turn of it to write.

        Raises GENERATION_MOVED when this router is not the owner that the caller addresses.
        """
        if owner_id != self._cluster.owner_id:
            raise errors.unavailable(MOVED, "another router has started at this address", 0.1)
        return self._turns.claimed.holds(session_id)

    async def _follow_anywhere(
        self, generation_id: str, reader: PassedReader, owner_id: str, whole: bool, tenant: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        lost: _Lost | None = None
        for _ in range(_MAX_MOVES):
            place = await self._locate(generation_id, lost, owner_id)
            try:
                async with aclosing(self._events(generation_id, place, reader, whole, tenant)) as events:
                    async for event in events:
                        if reader.wants(event):
                            yield event
                return
            except OwnerLostError as error:
                lost = None if place is None else _Lost(place, error.cause)
        raise moved(generation_id)

    def _events(
        self, generation_id: str, place: Head | None, reader: PassedReader, whole: bool, tenant: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        if place is None:
            return super().follow(generation_id, reader.from_index, whole=whole, tenant=tenant)
        self._cluster.metrics.relayed.inc()
        return self._cluster.peers.attach(place, generation_id, reader.from_index, whole=whole, tenant=tenant)

    async def _locate(self, generation_id: str, lost: _Lost | None, owner_id: str) -> Head | None:
        """Returns the head of another router's generation, or None when this router has it.

        This router may just have taken it over. Raises NOT_FOUND when no router has it. For a
        caller that addresses `owner_id`, any other router raises GENERATION_MOVED.
        """
        while self.find(generation_id) is None:
            if owner_id not in ("", self._cluster.owner_id):
                raise moved(generation_id)
            head = await self._head(generation_id)
            if self.find(generation_id) is not None:
                break  # another reader here took it over: the head names this router
            cause = self._why_take(head, lost)
            if owner_id and head.owner.owner_id != owner_id:
                raise moved(generation_id)
            if not cause:
                return head
            if await self._take(generation_id, head, cause) is None:
                await asyncio.sleep(_MOVE_PAUSE_S)
        return None

    async def _head(self, generation_id: str) -> Head:
        if not generation_id or len(generation_id) > MAX_ID_CHARS or self._cluster.recorder.forgetting(generation_id):
            raise errors.not_found("generation", generation_id)
        head = await self._asked(generation_id, self._cluster.journal.head(generation_id))
        if head is None:
            raise errors.not_found("generation", generation_id)
        return head

    def _why_take(self, head: Head, lost: _Lost | None) -> str:
        """Returns why this router should take the generation over, or empty to ask its owner."""
        if head.owner.owner_id == self._cluster.owner_id or head.owner.address == self._owner.address:
            return RESTARTED
        if lost is None:
            return ""
        # A router that cannot read the request takes the generation each time that it is asked, with another epoch.
        same = lost.head.owner == head.owner if lost.cause == TOO_OLD else lost.head == head
        return lost.cause if same else ""

    async def _take(self, generation_id: str, head: Head, cause: str) -> Generation | None:
        """Takes a generation over. Returns None when another router was faster.

        Several readers here share one task, which continues when a reader leaves.
        """
        task = self._taking.get(generation_id)
        if task is None:
            task = self._background.once("take_over", self._take_over(generation_id, head, cause))
            self._taking[generation_id] = task
            task.add_done_callback(lambda task: self._took(generation_id, task))
        return await asyncio.shield(task)

    def _took(self, generation_id: str, task: asyncio.Task[Generation | None]) -> None:
        del self._taking[generation_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("generation not taken over", generation_id=generation_id, error=str(error))

    async def _take_over(self, generation_id: str, head: Head, cause: str) -> Generation | None:
        place = self.reserve()
        try:
            record = await self._taken(generation_id, head)
            if record is None:
                place.leave()
                return None
            check_readable(generation_id, record)
            generation = await self.adopt(generation_id, record, place)
        except BaseException:
            place.leave()
            raise
        self._cluster.metrics.taken_over.labels(cause).inc()
        log.warning(
            "generation taken over",
            generation_id=generation_id,
            cause=cause,
            from_router=head.owner.owner_id,
            epoch=record.epoch,
            tokens=generation.log.num_tokens,
        )
        return generation

    async def _taken(self, generation_id: str, head: Head) -> JournalRecord | None:
        return await self._asked(generation_id, self._cluster.journal.take(generation_id, head.epoch, self._owner))

    async def _asked(self, generation_id: str, answer: Awaitable[_Answer]) -> _Answer:
        """Returns the journal's answer. Raises JOURNAL_UNAVAILABLE when the journal fails.

        That includes unexpected exceptions: the store may have recovered when the client asks
        again.
        """
        try:
            return await answer
        except JournalUnavailableError as error:
            self._cluster.outage.begin(error)
            raise _unavailable(generation_id) from error
        except Exception as error:
            log.exception("journal request failed", generation_id=generation_id)
            raise _unavailable(generation_id) from error


def _unavailable(generation_id: str) -> errors.RyzansteinError:
    message = f"generation {generation_id[:MAX_ID_CHARS]} is not at this router and the journal is unavailable"
    return errors.unavailable("JOURNAL_UNAVAILABLE", message)
