"""Which adapters are in memory: one load for all who wait, room by eviction, never of what is in use or pinned."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import AdapterRef
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.agent.adapters.residency import AdapterPacking, AdapterResidency
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter
from ryzanstein.worker.telemetry.adapter_metrics import AdapterMetrics

MIB = 2**20


class Ranks:
    """Remembers what ranks are sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Memory:
    """A residency of three adapters of 1 MiB, with a pack that a test can hold back."""

    def __init__(self) -> None:
        self.packs: list[str] = []
        self.may_pack = asyncio.Event()
        self.may_pack.set()
        self.changed: list[bytes] = []
        self.metrics = AdapterMetrics(CollectorRegistry())
        packing = AdapterPacking(self._pack, lambda _, work: asyncio.create_task(work), self.metrics)
        self.residency = AdapterResidency(3 * MIB, packing, self.changed.append)
        self.ranks = Ranks()
        self.residency.on_ready(self.ranks)  # type: ignore[arg-type]

    async def _pack(self, adapter: RegisteredAdapter) -> int:
        self.packs.append(adapter.ref.name)
        await self.may_pack.wait()
        if adapter.ref.name == "broken":
            raise RuntimeError("broken")
        return os.memfd_create(adapter.ref.name)


def registered(name: str, size: int = MIB, *, pinned: bool = False) -> RegisteredAdapter:
    return RegisteredAdapter(AdapterRef(name, name.encode().ljust(32)), Path("/nowhere"), size, 1, pinned)


async def test_two_hundred_first_requests_are_one_load() -> None:
    memory = Memory()
    memory.may_pack.clear()
    leases = [asyncio.create_task(memory.residency.lease(registered("a"))) for _ in range(200)]
    await asyncio.sleep(0)
    leases[0].cancel()
    memory.may_pack.set()
    done = await asyncio.gather(*leases, return_exceptions=True)
    assert memory.packs == ["a"]
    assert {lease.slot for lease in done[1:]} == {1}  # type: ignore[union-attr]
    assert [type(each) for each in memory.ranks.sent] == [MapAdapter]
    assert os.path.samestat(os.stat(memory.ranks.sent[0].path), os.fstat(int(memory.ranks.sent[0].path.rsplit("/")[-1])))


async def test_the_least_recently_used_idle_one_makes_room() -> None:
    memory = Memory()
    for name in "abc":
        (await memory.residency.lease(registered(name))).release()
    (await memory.residency.lease(registered("a"))).release()
    (await memory.residency.lease(registered("d"))).release()
    assert memory.ranks.sent[3:] == [DropAdapter(2), MapAdapter(4, memory.ranks.sent[-1].path)]
    assert [memory.residency.has(registered(name).ref.digest) for name in "abcd"] == [True, False, True, True]
    assert memory.residency.num_bytes == 3 * MIB


async def test_who_finds_all_in_use_waits_until_one_is_idle() -> None:
    memory = Memory()
    leases = [await memory.residency.lease(registered(name)) for name in "abc"]
    waiting = asyncio.create_task(memory.residency.lease(registered("d")))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    leases[1].release()
    leases[1].release()
    assert (await asyncio.wait_for(waiting, 1)).slot
    assert not memory.residency.has(registered("b").ref.digest)


async def test_two_that_wait_do_not_keep_each_other_out() -> None:
    memory = Memory()
    held = await memory.residency.lease(registered("a", 2 * MIB))
    large = [asyncio.create_task(memory.residency.lease(registered(name, 2 * MIB))) for name in "bc"]
    await asyncio.sleep(0.01)
    held.release()
    first, _ = await asyncio.wait(large, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    assert len(first) == 1, "both together do not fit"
    first.pop().result().release()
    await asyncio.wait_for(asyncio.gather(*large), 1)


async def test_pinned_ones_are_never_evicted_and_leave_no_room() -> None:
    memory = Memory()
    for name in "ab":
        (await memory.residency.lease(registered(name, pinned=True))).release()
    with pytest.raises(RyzansteinError, match="leave no room") as refused:
        await memory.residency.lease(registered("large", 2 * MIB))
    assert refused.value.reason == "ADAPTER_NO_ROOM"
    for name in "cde":
        (await memory.residency.lease(registered(name))).release()
    assert all(memory.residency.has(registered(name).ref.digest) for name in "ab")
    (await memory.residency.lease(registered("a"))).release()  # no longer pinned
    for name in "fg":
        (await memory.residency.lease(registered(name))).release()
    assert not memory.residency.has(registered("a").ref.digest)


async def test_a_load_that_fails_fails_for_all_who_wait_and_is_tried_again() -> None:
    memory = Memory()
    broken = registered("broken")
    done = await asyncio.gather(*(memory.residency.lease(broken) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in done] == [RuntimeError] * 3
    assert memory.residency.num_bytes == 0
    with pytest.raises(RuntimeError):
        await memory.residency.lease(broken)
    assert memory.packs == ["broken"] * 2


async def test_what_is_removed_leaves_when_nothing_runs_with_it() -> None:
    memory = Memory()
    first, second = [await memory.residency.lease(registered("a")) for _ in range(2)]
    memory.residency.drop(registered("a").ref.digest)
    first.release()
    assert memory.residency.has(registered("a").ref.digest)
    second.taken().release()
    assert memory.ranks.sent[1:] == [DropAdapter(1)]
    assert len(memory.residency) == 0


async def test_with_the_ranks_goes_all_that_they_had() -> None:
    memory = Memory()
    held = await memory.residency.lease(registered("a"))
    memory.may_pack.clear()
    loading = asyncio.create_task(memory.residency.lease(registered("b")))
    await asyncio.sleep(0.01)
    memory.residency.on_gone()
    memory.may_pack.set()
    with pytest.raises(RyzansteinError) as refused:
        await loading
    assert refused.value.reason == "NODE_NOT_READY"
    memory.residency.on_ready(memory.ranks)  # type: ignore[arg-type]
    again = await memory.residency.lease(registered("a"))
    held.release()
    assert memory.residency.has(registered("a").ref.digest)
    again.release()
