"""The sessions that this router has claimed: it claims, renews while generations run, and releases.

The claims of this router itself are known without the store. A claim that the store has lost (it
was emptied, or was away for longer than a claim lives) is taken again by the next renewal, unless
another router was faster. The owner of a conflicting claim is asked. The claim blocks nothing when
its owner is gone or is this router, which no longer holds it, or when it has expired and its owner
does not hold the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from ryzanstein.process.background import Background
from ryzanstein.router.sessions.claims import ClaimRequest, Holding, SessionBusyError
from ryzanstein.router.sessions.store import ServingStore, StoreUnavailableError

log = structlog.get_logger(__name__)

_RENEWALS_PER_TTL = 3
_MAX_BATCH = 500


class Claimed:
    """The claims of one owner.

    `ask` asks another owner about a session. `close` waits for pending releases.
    """

    def __init__(
        self,
        store: ServingStore,
        owner: str,
        ttl_s: float,
        ask: Callable[[str, str], Awaitable[Holding]],
        background: Background,
    ) -> None:
        self._store = store
        self._owner = owner
        self._ttl_s = ttl_s
        self._ask = ask
        self._background = background
        self._held: dict[str, str] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._pending: set[str] = set()
        self._ending: set[str] = set()
        self._batch = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def claim(self, session_id: str, generation_id: str) -> None:
        """Claims the session for the generation.

        Raises ABORTED SESSION_BUSY while another generation speaks in the session, here or at
        another router. If cancelled, releases what may have been claimed.
        """
        if (held := self._held.get(session_id, generation_id)) != generation_id:
            raise SessionBusyError(session_id, held, self._owner)
        self._held[session_id] = generation_id
        self._pending.add(session_id)
        try:
            if (releasing := self._releasing.get(session_id)) is not None:
                await asyncio.shield(releasing)
            await self._take(session_id, generation_id)
        except BaseException as error:
            # A refusal claimed nothing; after a cancellation the claim may have been taken.
            self.release(session_id, generation_id, ended=isinstance(error, Exception))
            raise
        finally:
            self._pending.discard(session_id)
        if self._renewing is None:
            self._renewing = self._background.supervise("claim_renewal", self._renew, finite=True)

    def release(self, session_id: str, generation_id: str, *, ended: bool = False) -> None:
        """Releases the claim. `ended`: nothing is left to release in the store."""
        if self._held.get(session_id) != generation_id:
            return
        del self._held[session_id]
        self._ending.discard(session_id)
        if not ended:
            task = self._background.once("claim_release", self._give_back(session_id, generation_id))
            self._releasing[session_id] = task
            task.add_done_callback(lambda _: self._released(session_id, task))

    def holds(self, session_id: str) -> bool:
        """Returns whether this router speaks in the session or has a turn of it to write."""
        return session_id in self._held or self._store.unwritten(session_id)

    async def settle(self, session_id: str, generation_id: str) -> None:
        """Returns when no renewal of the claim is under way, and starts none until `release`.

        A renewal takes again what the store has lost: after the turn was stored, which ends the claim,
        it would claim the session anew.
        """
        if self._held.get(session_id) != generation_id:
            return
        self._ending.add(session_id)
        async with self._batch:
            return

    async def released(self, session_id: str) -> None:
        """Returns when the store no longer has a claim that `release` gave back.

        Cancelling the wait does not stop the release.
        """
        if (releasing := self._releasing.get(session_id)) is not None:
            await asyncio.wait({releasing})

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)

    async def _take(self, session_id: str, generation_id: str) -> None:
        request = ClaimRequest(session_id, generation_id, self._owner, self._ttl_s)
        try:
            await self._store.claim(request)
        except SessionBusyError as busy:
            gone = busy.owner if await self._is_gone(session_id, busy) else ""
            await self._store.claim(replace(request, gone=gone, expired_of=busy.owner))
            log.warning("stale session claim replaced", session_id=session_id, of=busy.owner, held_for=busy.generation_id)

    async def _is_gone(self, session_id: str, busy: SessionBusyError) -> bool:
        """Returns whether a claim's owner is gone. Raises the error again if the claim stands."""
        if busy.owner == self._owner:
            return True
        holding = await self._ask(busy.owner, session_id)
        if holding is Holding.HELD or (holding is not Holding.GONE and not busy.expired):
            raise busy
        return holding is Holding.GONE

    def _released(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._releasing.get(session_id) is task:
            del self._releasing[session_id]

    async def _give_back(self, session_id: str, generation_id: str) -> None:
        try:
            await self._store.release(session_id, generation_id, self._owner)
        except StoreUnavailableError:
            log.debug("claim left to expire", session_id=session_id)

    async def _renew(self) -> None:
        """Renews until nothing is held; the next claim starts it again.

        A claim that is pending is not renewed. Its session may have an expired claim, whose owner is
        being asked: a renewal would take the session before the answer.
        """
        while self._held:
            await asyncio.sleep(self._ttl_s / _RENEWALS_PER_TTL)
            held = list(self._held.items())
            for first in range(0, len(held), _MAX_BATCH):
                async with self._batch:
                    batch = held[first : first + _MAX_BATCH]
                    left_out = self._pending | self._ending
                    await self._renew_batch({s: g for s, g in batch if self._held.get(s) == g and s not in left_out})
        self._renewing = None

    async def _renew_batch(self, held: dict[str, str]) -> None:
        try:
            lost = await self._store.renew(held, self._owner, self._ttl_s)
        except StoreUnavailableError:
            return
        for session_id in lost:
            if self._held.get(session_id) == held[session_id]:
                log.warning("session claim lost", session_id=session_id, generation_id=held[session_id])
        # A claim that was released during its renewal may have been taken again by that renewal.
        for session_id, generation_id in held.items():
            if session_id not in self._held and session_id not in lost and session_id not in self._releasing:
                await self._give_back(session_id, generation_id)
