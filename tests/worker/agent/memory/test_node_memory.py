"""The memory that models share: who takes it, who gives way, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.agent.memory.node_memory import ModelMemory, SharedRoom


class Resting:
    """A model that is idle, and gives back what it has when it is put to sleep."""

    def __init__(self, memory: ModelMemory, rested_s: float) -> None:
        self._memory, self.rested_s, self.slept = memory, rested_s, False

    async def sleep(self) -> None:
        self.slept = True
        self._memory.give_back(self)


def test_memory_is_taken_once_and_given_back() -> None:
    memory = ModelMemory(100)
    assert memory.take("a", 60)
    assert memory.take("a", 60), "it has it already"
    assert not memory.take("b", 41)
    assert (memory.free, memory.taken("a"), memory.taken("b")) == (40, 60, 0)
    memory.give_back("a")
    memory.give_back("a")
    assert memory.take("b", 100)


def test_what_is_seen_counts_even_if_it_is_too_much() -> None:
    memory = ModelMemory(100)
    memory.grow("a", 60)
    memory.grow("a", 20)
    assert memory.taken("a") == 60
    memory.grow("a", 130)
    assert memory.free == -30
    assert not memory.take("b", 0)


def test_a_replacement_takes_over_what_it_was_loaded_into() -> None:
    memory = ModelMemory(100)
    memory.take("old", 40)
    memory.take("new", 50)
    memory.hand_over("new", "old")
    assert (memory.taken("old"), memory.taken("new"), memory.free) == (50, 0, 50)


async def test_who_waits_for_memory_learns_that_some_is_free() -> None:
    memory = ModelMemory(100)
    memory.take("a", 60)
    waiting = asyncio.create_task(memory.freed())
    await asyncio.sleep(0)
    assert not waiting.done()
    memory.give_back("a")
    await asyncio.wait_for(waiting, 1)


async def test_the_models_that_rest_longest_are_put_to_sleep_as_many_as_needed() -> None:
    memory = ModelMemory(100)
    models = [Resting(memory, rested_s) for rested_s in (5.0, 50.0, 20.0)]
    for model in models:
        memory.take(model, 30)
    room = SharedRoom(memory, "woken", lambda: [model for model in models if not model.slept], "woken", 60)
    await room.take()
    assert [model.slept for model in models] == [False, True, True]
    assert memory.taken("woken") == 60
    room.give_back()
    assert memory.free == 70


async def test_without_anyone_to_put_to_sleep_the_missing_bytes_are_named() -> None:
    memory = ModelMemory(2**31)
    memory.take("busy", 2**30)
    room = SharedRoom(memory, "woken", list, "woken", 3 * 2**29)
    with pytest.raises(RyzansteinError, match=r"needs 1\.50 GiB, and 0\.50 GiB of that are used by busy models") as refused:
        await room.take()
    assert (refused.value.code.name, refused.value.reason) == ("UNAVAILABLE", "NO_ROOM_TO_WAKE")


async def test_a_model_that_is_removed_while_it_makes_room_takes_none() -> None:
    memory = ModelMemory(100)

    class Slow(Resting):
        async def sleep(self) -> None:
            room.close()
            await super().sleep()

    other = Slow(memory, 5.0)
    memory.take(other, 100)
    room = SharedRoom(memory, "woken", lambda: [other], "woken", 60)
    with pytest.raises(RyzansteinError, match="model 'woken' was removed") as refused:
        await room.take()
    assert (refused.value.reason, memory.free) == ("NODE_NOT_READY", 100)
