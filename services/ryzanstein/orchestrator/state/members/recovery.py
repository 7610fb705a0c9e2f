"""Makes a restart invisible: stores the members, and delays the first snapshot until they are back.

Nodes register again within a second after a short restart, and within some seconds after a long
outage. Until then the cluster looks empty, and a snapshot of it would make routers forget nodes
that work. So the first snapshot waits until every stored member is back and has reported with a
beat what it serves, but at most for `settle_s`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.orchestrator.state.stored import StateStore, StoredHalt, StoredMembership, StoredRefusal

log = structlog.get_logger(__name__)

# All changes of membership within this time cost one transaction.
_SPACING_S = 0.2


class Settling:
    """The time between a restart and the moment when the members are known again."""

    def __init__(self, expected: frozenset[str], started: float, settle_s: float, share: float = 1.0) -> None:
        """`share` of the expected members is enough."""
        self._missing = set(expected)
        self._spared = len(expected) - math.ceil(share * len(expected))
        self._started = started
        self._until = started + settle_s

    def reported(self, node_id: str) -> None:
        """Records that the node beats again."""
        self._missing.discard(node_id)

    def over(self, now: float) -> bool:
        """Returns whether enough members beat again, or the others had enough time."""
        return len(self._missing) <= self._spared or now >= self._until

    def elapsed_s(self, now: float) -> float:
        return now - self._started

    @property
    def missing(self) -> frozenset[str]:
        """Previous members that are not back yet."""
        return frozenset(self._missing)


class UnwrittenRefusals(Protocol):
    """The refusals, as far as they are not stored."""

    def unwritten(self) -> tuple[StoredRefusal, ...] | None: ...

    def wrote(self, stored: Iterable[StoredRefusal]) -> None: ...


class UnwrittenHalts(Protocol):
    """The halts, as far as they are not stored."""

    def unwritten(self) -> tuple[StoredHalt, ...] | None: ...

    def wrote(self, stored: Iterable[StoredHalt]) -> None: ...


class MembershipRecorder:
    """Writes the membership, the refusals and the halts to the store in the background, many changes in one transaction."""

    def __init__(
        self,
        store: StateStore,
        current: Callable[[], StoredMembership],
        refusals: UnwrittenRefusals,
        halts: UnwrittenHalts,
    ) -> None:
        self._store, self._current, self._refusals, self._halts = store, current, refusals, halts
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Notes that the membership may differ from what is written."""
        self._changed.set()

    async def flush(self) -> None:
        """Returns when the membership of this moment is written.

        Raises UNAVAILABLE when the store fails.
        """
        await self._store.save_membership(self._current())

    async def flush_all(self) -> None:
        """The same, and the refusals and the halts."""
        await self.flush()
        if (refusals := self._refusals.unwritten()) is not None:
            await self._store.save_refusals(refusals)
            self._refusals.wrote(refusals)
        if (halts := self._halts.unwritten()) is not None:
            await self._store.save_halts(halts)
            self._halts.wrote(halts)

    @property
    def behind(self) -> bool:
        """Whether there are refusals or halts to be written."""
        return self._refusals.unwritten() is not None or self._halts.unwritten() is not None

    async def run(self) -> None:
        """Writes until cancelled.

        A failed write is retried with the next spacing; the store counts and logs it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.flush_all()
            except errors.RyzansteinError:
                self._changed.set()
            except Exception:
                self._changed.set()  # for the run after this one
                raise
            await asyncio.sleep(_SPACING_S)
