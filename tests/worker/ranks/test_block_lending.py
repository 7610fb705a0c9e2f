"""Real ranks whose blocks are lent and taken back in the middle of answers: the same bits, and the memory returns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.messages import EngineStats, SetBlockLimit, StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.settings.rank_settings import ModelSettings
from ryzanstein.worker.supervision.group import GroupEvents
from ryzanstein.worker.supervision.watchdog import StallBounds

pytestmark = [pytest.mark.distributed, pytest.mark.long]

DEMO = Path(__file__).parents[3] / "shared" / "ryzanstein" / "demo"
RANK = (sys.executable, "-m", "ryzanstein.worker.ranks.rank")
MIB = 2**20
OWN, MORE = 40, 600


class Lending:
    """One group of the demo model, and all tokens that it generated."""

    def __init__(self, tp: int, *, borrow_bytes: int) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed: list[str] = []
        self.stats: EngineStats | None = None
        self.arrived = asyncio.Event()
        self.submitted = 0
        self.server = ForkServer(RANK, {"OMP_NUM_THREADS": "1"})
        spec = RankSpec(
            str(DEMO),
            tp,
            device="cpu",
            settings=ModelSettings(num_blocks=OWN, max_sequences=16, lends_blocks=borrow_bytes > 0, borrow_bytes=borrow_bytes),
        )
        events = GroupEvents(self._on_step, lambda trace: None, lambda: len(self.ended) < self.submitted)
        self.group = RankGroup(spec, GroupBounds(start_s=90, stall=StallBounds(min_s=2.0)), events, self.server)

    def _on_step(self, events: StepEvents) -> None:
        for group, token in zip(events.groups, events.token_ids, strict=True):
            self.tokens.setdefault(group, []).append(token)
        self.ended |= {end.group for end in events.ended}
        self.failed += [failure.message for failure in events.failed]
        self.stats = events.stats
        self.arrived.set()

    def submit(self, length: int, max_tokens: int, temperature: float, priority: int = 0) -> None:
        self.submitted += 1
        sampling = SamplingParams(temperature=temperature, seed=5 + self.submitted)
        prompt = [(7 * self.submitted + i * i) % 200 for i in range(length)]
        self.group.send(SubmitGroup(self.submitted, prompt, sampling, max_tokens, [], [[]], [False], priority=priority))

    async def until(self, condition) -> None:
        async with asyncio.timeout(90):
            while not condition(self):
                assert not self.group.lost.done(), self.group.lost.result()
                assert not self.failed
                self.arrived.clear()
                await self.arrived.wait()

    async def limit(self, num_blocks: int) -> None:
        """Sets the limit, and waits until it holds."""
        self.group.send(SetBlockLimit(num_blocks))
        await self.until(lambda it: it.stats is not None and it.stats.block_limit == num_blocks)

    async def close(self) -> None:
        await self.group.end(graceful=False)
        await self.server.close()


async def answers(tp: int, limits: Sequence[int], *, borrow_bytes: int) -> tuple[dict[int, list[int]], EngineStats]:
    """Runs ten requests, half of them greedy, while the limit changes at every 12th token of the first."""
    it = Lending(tp, borrow_bytes=borrow_bytes)
    try:
        await it.group.start()
        for limit in limits[:1]:
            await it.limit(limit)
        for i in range(10):
            it.submit(90 + 7 * i, 60, temperature=0.0 if i % 2 else 0.9, priority=int(i == 0))
        for number, limit in enumerate(limits[1:], 1):
            await it.until(lambda it, number=number: len(it.tokens.get(1, [])) >= 12 * number)
            await it.limit(limit)
        await it.until(lambda it: len(it.ended) == 10)
        assert it.stats is not None
        return it.tokens, it.stats
    finally:
        await it.close()


@pytest.mark.parametrize("tp", [1, 2])
async def test_lending_and_takebacks_change_no_bit_of_an_answer(tp) -> None:
    alone, _ = await answers(tp, [], borrow_bytes=0)
    lent, stats = await answers(tp, [200, 30, 120, 20, 40], borrow_bytes=64 * MIB // tp)
    assert lent == alone
    assert {len(tokens) for tokens in alone.values()} == {60}
    assert stats.takebacks == 2
    assert stats.paused["takeback"] > 0


async def test_the_memory_of_blocks_that_are_taken_back_returns_to_the_system() -> None:
    it = Lending(1, borrow_bytes=64 * MIB)
    try:
        (ready,) = await it.group.start()
        assert (ready.num_blocks, ready.without_lending) == (OWN, "")
        assert ready.max_blocks == OWN + 64 * MIB // ready.block_bytes
        assert ready.context_length == OWN * 16
        before = sum(it.group.resident_bytes())
        await it.limit(MORE)
        for _ in range(12):
            it.submit(600, 8, temperature=0.0)
        await it.until(lambda it: len(it.ended) == 12)
        assert it.stats is not None
        used = (it.stats.blocks_held + it.stats.blocks_cached) * ready.block_bytes
        assert used > 20 * MIB
        grown = sum(it.group.resident_bytes()) - before
        assert grown > 0.8 * used
        await it.limit(OWN)
        left = sum(it.group.resident_bytes()) - before
        print(f"\nused {used / MIB:.1f} MiB, resident +{grown / MIB:.1f}, after the takeback +{left / MIB:.1f}")
        assert grown - left > 0.8 * (used - OWN * ready.block_bytes)
    finally:
        await it.close()


async def test_ranks_without_enough_blocks_wait_and_are_not_lost() -> None:
    it = Lending(2, borrow_bytes=MIB)
    try:
        await it.group.start()
        await it.limit(2)
        it.submit(100, 8, temperature=0.0)
        await asyncio.sleep(2.5)  # longer than nothing may move
        assert not it.group.lost.done()
        assert not it.tokens
        await it.limit(OWN)
        await it.until(lambda it: it.ended == {1})
    finally:
        await it.close()
