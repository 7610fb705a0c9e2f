"""Which adapters are in the memory of a model's ranks: loaded when they are asked for, within a bound of bytes.

An adapter is packed beside the ranks' loop into memory that has no name in any file system; the ranks map it between two
steps. Those that nothing runs with are evicted when another one needs room, the least recently used first. An adapter is
loaded once however many requests wait for it, and counted by generations, not by their choices.
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
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.telemetry.adapter_metrics import AdapterMetrics

log = structlog.get_logger(__name__)

MAX_RESIDENT = 512
"""At once: each keeps a file descriptor."""
_CLOSE_AFTER_S = 60.0  # ranks may be in a long step before they open what they were told to

Pack = Callable[[RegisteredAdapter], Coroutine[Any, Any, int]]
"""Packs an adapter for the ranks; returns the descriptor of the memory. Raises a RyzansteinError."""


@dataclass(frozen=True, slots=True)
class AdapterPacking:
    """How adapters are packed: `start` runs a task."""

    pack: Pack
    start: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
    metrics: AdapterMetrics


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
        self._room = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Of the adapters that are there or being loaded, without those that wait for room."""
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
            _close_later(resident)
        self._room.set()

    async def lease(self, adapter: RegisteredAdapter) -> AdapterLease:
        """Returns a hold on the adapter when the ranks have been told of it.

        Raises ADAPTER_NO_ROOM where pinned ones leave it none, and what `pack` raises. Waits while others that are in use
        leave it none.
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
        pinned = sum(each.adapter.num_bytes for each in self._residents.values() if each.adapter.pinned)
        if pinned + adapter.num_bytes > self._max_bytes:
            raise errors.adapter_no_room(adapter.ref.name, adapter.num_bytes, self._max_bytes)

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

    async def _make_room(self, resident: _Resident) -> None:
        """Evicts idle adapters until this one fits; waits while those in use fill the memory."""
        while not self._fits(resident.adapter):
            idle = (each for each in self._residents.values() if each.loaded and not (each.references or each.adapter.pinned))
            if (first := next(idle, None)) is not None:
                self._packing.metrics.evictions.inc()
                self._drop(first)
                continue
            self._room.clear()
            await self._room.wait()
            if self._residents.get(resident.adapter.ref.digest) is not resident:
                raise errors.unavailable("NODE_NOT_READY", "the ranks were lost while an adapter waited for memory")
        resident.has_room = True

    def _fits(self, adapter: RegisteredAdapter) -> bool:
        num = sum(each.has_room for each in self._residents.values())
        return self.num_bytes + adapter.num_bytes <= self._max_bytes and num < MAX_RESIDENT

    def _release(self, resident: _Resident) -> None:
        resident.references -= 1
        self._drop_leaving(resident)
        self._room.set()

    def _drop(self, resident: _Resident) -> None:
        self._forget(resident)
        if self._group is not None:
            self._group.send(DropAdapter(resident.slot))
        _close_later(resident)
        self._on_change(resident.adapter.ref.digest)

    def _forget(self, resident: _Resident) -> None:
        if self._residents.get(resident.adapter.ref.digest) is resident:
            del self._residents[resident.adapter.ref.digest]
        self._room.set()


def _close_later(resident: _Resident) -> None:
    if resident.fd >= 0:
        asyncio.get_running_loop().call_later(_CLOSE_AFTER_S, os.close, resident.fd)
        resident.fd = -1
