"""Which adapters are in the memory of a model's ranks: loaded when they are asked for, within a bound of bytes.

An adapter is packed beside the ranks' loop into memory that has no name in any file system; the ranks map it between two
steps. Those that nothing runs with are evicted when another one needs room, the least recently used first. An adapter is
loaded once however many requests wait for it, and counted by generations, not by their choices. One that was evicted takes
memory until the ranks have forgotten it.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import structlog

from ryzanstein import errors
from ryzanstein.worker.agent.adapters.files import MAX_RESIDENT
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.telemetry.adapter_metrics import AdapterMetrics

log = structlog.get_logger(__name__)

_CLOSE_AFTER_S = 60.0  # ranks may be in a long step before they do what they were told to

Pack = Callable[[RegisteredAdapter], Coroutine[Any, Any, int]]
"""Packs an adapter for the ranks; returns the descriptor of the memory. Raises a RyzansteinError."""


@dataclass(frozen=True, slots=True)
class AdapterPacking:
    """How adapters are packed: `start` runs a task. `is_pinned`: those with this digest are not evicted."""

    pack: Pack
    start: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
    metrics: AdapterMetrics
    is_pinned: Callable[[bytes], bool]


@dataclass(slots=True, eq=False)
class _Resident:
    adapter: RegisteredAdapter
    slot: int
    loading: asyncio.Task[None] | None = None
    has_room: bool = False
    loaded: bool = False
    leaving: bool = False
    references: int = 0
    fd: int = -1


@dataclass(slots=True)
class AdapterLease:
    """A generation's hold on an adapter in the ranks' memory. `slot` 0: it has none."""

    slot: int = 0
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def taken(self) -> AdapterLease:
        """Returns the hold for another owner, who releases it: this one has none any more."""
        taken, self._release = AdapterLease(self.slot, self._release), None
        return taken

    def release(self) -> None:
        """Lets the adapter go, once."""
        release, self._release = self._release, None
        if release is not None:
            release()


class AdapterResidency:
    """The adapters in the memory of one group of ranks.

    `max_bytes` bounds them; `on_change` is called with the digest of one that comes or goes.
    """

    def __init__(self, max_bytes: int, packing: AdapterPacking, on_change: Callable[[bytes], None]) -> None:
        self._max_bytes, self._packing, self._on_change = max_bytes, packing, on_change
        self._group: EngineGroup | None = None
        self._residents: OrderedDict[bytes, _Resident] = OrderedDict()
        self._leaving: dict[_Resident, int] = {}
        self._room = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Of the adapters that are there, being loaded or leaving, without those that wait for room."""
        return self._kept_bytes + sum(self._leaving.values())

    @property
    def _kept_bytes(self) -> int:
        return sum(each.adapter.num_bytes for each in self._residents.values() if each.has_room)

    def __len__(self) -> int:
        return sum(each.loaded for each in self._residents.values())

    def has(self, digest: bytes) -> bool:
        """Returns whether an adapter is there: a lease need not wait."""
        resident = self._residents.get(digest)
        return resident is not None and resident.loaded

    def on_ready(self, group: EngineGroup) -> None:
        """Begins with new ranks, which have none."""
        self._group = group

    def on_gone(self) -> None:
        """Ends with the ranks. Leases that are still held mean nothing any more."""
        gone, self._residents, self._group = self._residents, OrderedDict(), None
        for resident in gone.values():
            _close(resident)
        self._room.set()

    def hold(self, digest: bytes) -> AdapterLease:
        """Returns a hold on an adapter that is there, so that it stays; an empty one if it is not."""
        resident = self._residents.get(digest)
        if resident is None or not resident.loaded:
            return AdapterLease()
        resident.references += 1
        return AdapterLease(resident.slot, lambda: self._release(resident))

    async def lease(self, adapter: RegisteredAdapter) -> AdapterLease:
        """Returns a hold on the adapter when the ranks have been told of it.

        Raises ADAPTER_NO_ROOM where pinned ones leave it none, and what `pack` raises. Waits while others that are in use
        leave it none; who came first is first. Cancelled: nothing is held, and what nobody waits for any more is not loaded.
        """
        digest = adapter.ref.digest
        resident = self._residents.get(digest)
        self._packing.metrics.requests.labels("hit" if self.has(digest) else "miss").inc()
        if resident is None:
            self._require_room(adapter)
            resident = self._residents[digest] = _Resident(adapter, self._free_slot())
            resident.loading = self._packing.start("adapter", self._load(resident))
        resident.references += 1
        resident.adapter, resident.leaving = adapter, False
        try:
            if resident.loading is not None:
                await asyncio.shield(resident.loading)
        except BaseException:
            self._release(resident)
            raise
        self._residents.move_to_end(digest)
        return AdapterLease(resident.slot, lambda: self._release(resident))

    def drop(self, digest: bytes) -> None:
        """Drops an adapter that is no longer registered, as soon as nothing runs with it."""
        resident = self._residents.get(digest)
        if resident is not None:
            resident.leaving = True
            self._drop_leaving(resident)

    def _drop_leaving(self, resident: _Resident) -> None:
        there = self._residents.get(resident.adapter.ref.digest) is resident and resident.loaded
        if resident.leaving and there and not resident.references:
            self._drop(resident)

    def _require_room(self, adapter: RegisteredAdapter) -> None:
        others = (each.adapter for each in self._residents.values() if each.adapter.ref.digest != adapter.ref.digest)
        pinned = [each.num_bytes for each in others if self._packing.is_pinned(each.ref.digest)]
        if sum(pinned) + adapter.num_bytes > self._max_bytes or len(pinned) >= MAX_RESIDENT:
            raise errors.adapter_no_room(adapter.ref.name, adapter.num_bytes, self._max_bytes, MAX_RESIDENT)

    def _free_slot(self) -> int:
        taken = {each.slot for each in self._residents.values()}
        return next(slot for slot in count(1) if slot not in taken)

    async def _load(self, resident: _Resident) -> None:
        try:
            await self._make_room(resident)
            with self._packing.metrics.load.time():
                fd = await self._packing.pack(resident.adapter)
        except BaseException:
            self._forget(resident)
            raise
        if self._group is None or self._residents.get(resident.adapter.ref.digest) is not resident:
            os.close(fd)
            raise errors.unavailable("NODE_NOT_READY", "the ranks were lost while an adapter was loaded")
        resident.fd, resident.loaded, resident.loading = fd, True, None
        self._group.send(MapAdapter(resident.slot, f"/proc/{os.getpid()}/fd/{fd}"))
        log.info("adapter loaded", adapter=resident.adapter.ref.name, slot=resident.slot, bytes=resident.adapter.num_bytes)
        self._on_change(resident.adapter.ref.digest)
        self._drop_leaving(resident)  # it was removed, and who asked for it has gone

    async def _make_room(self, resident: _Resident) -> None:
        """Evicts idle adapters until this one fits; waits while those in use fill the memory."""
        while not self._has_room(resident):
            self._room.clear()
            await self._room.wait()
            if self._residents.get(resident.adapter.ref.digest) is not resident:
                raise errors.unavailable("NODE_NOT_READY", "the ranks were lost while an adapter waited for memory")
            self._require_room(resident.adapter)  # others may have been pinned meanwhile
            if not resident.references:
                raise errors.unavailable("NODE_NOT_READY", "nobody waits for the adapter any more")
        resident.has_room = True
        self._room.set()  # for the one behind it

    def _has_room(self, resident: _Resident) -> bool:
        """Returns whether it may be packed now. Evicts as many of the others as it needs if it is the first that waits."""
        if next((each for each in self._residents.values() if not each.has_room), None) is not resident:
            return False
        while not self._fits(resident, self._kept_bytes, 0):
            idle = (each for each in self._residents.values() if each.loaded and not each.references)
            evicted = next((each for each in idle if not self._packing.is_pinned(each.adapter.ref.digest)), None)
            if evicted is None:
                return False
            self._packing.metrics.evictions.inc()
            self._drop(evicted)
        return self._fits(resident, self.num_bytes, len(self._leaving))

    def _fits(self, resident: _Resident, taken: int, num_leaving: int) -> bool:
        num = num_leaving + sum(each.has_room for each in self._residents.values())
        return taken + resident.adapter.num_bytes <= self._max_bytes and num < MAX_RESIDENT

    def _release(self, resident: _Resident) -> None:
        resident.references -= 1
        self._drop_leaving(resident)
        self._room.set()

    def _drop(self, resident: _Resident) -> None:
        self._forget(resident)
        if self._group is None:
            _close(resident)
        else:
            self._group.send(DropAdapter(resident.slot))
            self._leaving[resident] = resident.adapter.num_bytes
            self._packing.start("adapter_leaves", self._leave(resident, self._group))
        self._on_change(resident.adapter.ref.digest)

    async def _leave(self, resident: _Resident, group: EngineGroup) -> None:
        """Gives the memory back when the ranks have forgotten the adapter: until then they may still have to open it."""
        try:
            async with asyncio.timeout(_CLOSE_AFTER_S):
                await group.obeyed()
        except TimeoutError:
            log.warning("ranks have not told that they forgot an adapter", adapter=resident.adapter.ref.name)
        finally:
            _close(resident)
            del self._leaving[resident]
            self._room.set()

    def _forget(self, resident: _Resident) -> None:
        if self._residents.get(resident.adapter.ref.digest) is resident:
            del self._residents[resident.adapter.ref.digest]
        self._room.set()


def _close(resident: _Resident) -> None:
    if resident.fd >= 0:
        os.close(resident.fd)
        resident.fd = -1
