"""Which adapters are in memory: one load for all who wait, room by eviction, never of what is in use or pinned."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import AdapterRef
from ryzanstein.worker.agent.adapters import residency
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.agent.adapters.residency import AdapterPacking, AdapterResidency
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter
from ryzanstein.worker.telemetry.adapter_metrics import AdapterMetrics

MIB = 2**20


class Ranks:
    """Remembers what ranks are sent. A test can hold back that they do it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.may_obey = asyncio.Event()
        self.may_obey.set()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def obeyed(self) -> None:
        await self.may_obey.wait()


_NUMBERS = itertools.count()


class Memory:
    """A residency of three adapters of 1 MiB, with a pack that a test can hold back."""

    def __init__(self) -> None:
        self.name = f"test-{next(_NUMBERS)}"  # an id may be that of an earlier object, whose files are still open
        self.packs: list[str] = []
        self.may_pack = asyncio.Event()
        self.may_pack.set()
        self.changed: list[bytes] = []
        self.metrics = AdapterMetrics(CollectorRegistry())
        self.pinned: set[bytes] = set()
        self.tasks: list[asyncio.Task[None]] = []
        packing = AdapterPacking(self._pack, self._start, self.metrics, self.pinned.__contains__)
        self.residency = AdapterResidency(3 * MIB, packing, self.changed.append)
        self.ranks = Ranks()
        self.residency.on_ready(self.ranks)  # type: ignore[arg-type]

    def _start(self, _: str, work: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def _pack(self, adapter: RegisteredAdapter) -> int:
        self.packs.append(adapter.ref.name)
        await self.may_pack.wait()
        if adapter.ref.name == "broken":
            raise RuntimeError("broken")
        return os.memfd_create(self.name)

    async def used(self, *names: str) -> None:
        """Asks for adapters, one after the other."""
        for name in names:
            (await self.residency.lease(registered(name))).release()

    def has(self, *names: str) -> list[bool]:
        return [self.residency.has(registered(name).ref.digest) for name in names]

    def pin(self, *names: str) -> None:
        self.pinned |= {registered(name).ref.digest for name in names}

    @property
    def num_files(self) -> int:
        """How many packed adapters this process holds."""
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        return sum(path.startswith(f"/memfd:{self.name} ") for path in open_files)


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def registered(name: str, size: int = MIB) -> RegisteredAdapter:
    return RegisteredAdapter(AdapterRef(name, name.encode().ljust(32)), Path("/nowhere"), size, 1)


async def refused(lease: Any) -> RyzansteinError:
    with pytest.raises(RyzansteinError) as refusal:
        await asyncio.wait_for(lease, 1)
    return refusal.value


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
    memory.pin("a", "b")
    await memory.used("a", "b")
    error = await refused(memory.residency.lease(registered("large", 2 * MIB)))
    assert (error.reason, error.metadata["bound_bytes"]) == ("ADAPTER_NO_ROOM", str(3 * MIB))
    await memory.used("c", "d", "e")
    assert memory.has("a", "b", "e") == [True] * 3
    memory.pinned.remove(registered("a").ref.digest)
    await memory.used("f", "g")
    assert memory.has("a", "b") == [False, True], "it is no longer pinned, though nobody asked for it since"


async def test_pins_that_fill_the_memory_refuse_others_at_once_and_serve_their_own() -> None:
    memory = Memory()
    memory.pin("a", "b", "c")
    await memory.used("a", "b", "c")
    for name in "de":
        assert (await refused(memory.residency.lease(registered(name)))).reason == "ADAPTER_NO_ROOM"
    await memory.used("a", "b", "c")
    memory.pinned.clear()
    await memory.used("d")
    assert memory.has(*"abcd") == [False, True, True, True]


async def test_who_waits_for_room_is_refused_when_pins_take_it() -> None:
    memory = Memory()
    held = [await memory.residency.lease(registered(name)) for name in "abc"]
    waiting = asyncio.create_task(memory.residency.lease(registered("d")))
    await asyncio.sleep(0.01)
    memory.pin("a", "b", "c")
    for lease in held:
        lease.release()
    assert (await refused(waiting)).reason == "ADAPTER_NO_ROOM"


async def test_so_many_pins_that_there_are_no_files_left_refuse_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_RESIDENT", 2)
    memory = Memory()
    memory.pin("a", "b")
    await memory.used("a", "b")
    error = await refused(memory.residency.lease(registered("c", 1)))
    assert (error.reason, error.metadata["bound"]) == ("ADAPTER_NO_ROOM", "2")


async def test_one_that_is_larger_than_all_memory_is_refused() -> None:
    memory = Memory()
    await memory.used("a")
    error = await refused(memory.residency.lease(registered("large", 3 * MIB + 1)))
    assert (error.reason, error.metadata["bytes"]) == ("ADAPTER_NO_ROOM", str(3 * MIB + 1))
    assert memory.has("a") == [True]


async def test_what_was_evicted_takes_memory_until_the_ranks_have_forgotten_it() -> None:
    memory = Memory()
    await memory.used("a", "b", "c")
    memory.ranks.may_obey.clear()
    loading = asyncio.create_task(memory.residency.lease(registered("d")))
    await asyncio.sleep(0.01)
    assert memory.ranks.sent[3:] == [DropAdapter(1)], "no more is evicted than is needed"
    assert (memory.packs, memory.residency.num_bytes, memory.num_files) == (["a", "b", "c"], 3 * MIB, 3)
    memory.ranks.may_obey.set()
    await asyncio.wait_for(loading, 1)
    assert (memory.residency.num_bytes, memory.num_files) == (3 * MIB, 3)


async def test_hundreds_in_turn_never_take_more_than_the_memory() -> None:
    memory, most = Memory(), 0
    for number in range(200):
        await memory.used(f"{number}")
        most = max(most, memory.num_files)
        assert memory.residency.num_bytes <= 3 * MIB
    assert most == 3


async def test_a_large_one_is_not_kept_waiting_by_small_ones_that_come_later() -> None:
    memory = Memory()
    held = [await memory.residency.lease(registered(name)) for name in "abc"]
    large = asyncio.create_task(memory.residency.lease(registered("large", 2 * MIB)))
    await asyncio.sleep(0.01)
    small = asyncio.create_task(memory.residency.lease(registered("d")))
    held[0].release()
    await asyncio.sleep(0.01)
    assert not small.done()
    held[1].release()
    (await asyncio.wait_for(large, 1)).release()
    held[2].release()
    (await asyncio.wait_for(small, 1)).release()


async def test_whoever_gives_up_leaves_nothing_behind() -> None:
    memory = Memory()
    memory.may_pack.clear()
    loading = [asyncio.create_task(memory.residency.lease(registered("a"))) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in loading:
        task.cancel()
    await asyncio.wait(loading)
    memory.residency.drop(registered("a").ref.digest)  # removed meanwhile, too
    memory.may_pack.set()
    await asyncio.wait(memory.tasks, timeout=1)
    await asyncio.gather(*memory.tasks)
    assert (memory.has("a"), memory.residency.num_bytes, memory.num_files) == ([False], 0, 0)


async def test_what_nobody_waits_for_any_more_is_not_loaded() -> None:
    memory = Memory()
    held = [await memory.residency.lease(registered(name)) for name in "abc"]
    waiting = asyncio.create_task(memory.residency.lease(registered("d")))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    for lease in held:
        lease.release()
    await asyncio.wait(memory.tasks, timeout=1)
    assert memory.packs == ["a", "b", "c"]
    assert memory.has(*"abcd") == [True, True, True, False]


async def test_a_hold_keeps_what_is_there_and_waits_for_nothing() -> None:
    memory = Memory()
    assert memory.residency.hold(registered("a").ref.digest).slot == 0
    await memory.used("a", "b", "c")
    hold = memory.residency.hold(registered("a").ref.digest)
    await memory.used("d")
    assert memory.has(*"abcd") == [True, False, True, True]
    hold.release()
    hold.release()
    await memory.used("e", "f", "g")
    assert memory.has("a") == [False]


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
