"""Adapters of real ranks: kept and forgotten between steps, by all ranks of a group, while others generate."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter, StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.settings.rank_settings import ModelSettings
from ryzanstein.worker.supervision.group import GroupEvents

pytestmark = [pytest.mark.distributed, pytest.mark.long]

DEMO = Path(__file__).parents[3] / "shared" / "ryzanstein" / "demo"
RANK = (sys.executable, "-P", "-m", "ryzanstein.worker.ranks.rank")
PROMPT = [(7 + i * i) % 200 for i in range(40)]


class Ranks:
    """A group of ranks, and the tokens of each group of choices."""

    def __init__(self, tp: int) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, asyncio.Event] = {}
        self.server = ForkServer(RANK, {"OMP_NUM_THREADS": "1"})
        spec = RankSpec(str(DEMO), tp, ModelSettings(num_blocks=64), device="cpu")
        events = GroupEvents(self._on_step, lambda trace: None, lambda: False, lambda answer: None)
        self.group = RankGroup(spec, GroupBounds(start_s=90), events, self.server)

    def _on_step(self, events: StepEvents) -> None:
        assert not events.failed
        for group, token in zip(events.groups, events.token_ids, strict=True):
            self.tokens[group].append(token)
        for end in events.ended:
            self.ended[end.group].set()

    def submit(self, group: int, adapter: int, content: int | None = None) -> None:
        """Submits a prompt to the adapter in a slot. `content`: that of another slot before."""
        self.tokens[group], self.ended[group] = [], asyncio.Event()
        root = bytes([adapter if content is None else content])
        message = SubmitGroup(
            group, PROMPT, SamplingParams(temperature=0), 24, [], [[]], [False], cache_root=root, adapter=adapter
        )
        self.group.send(message)

    async def answers(self, *groups: int) -> list[list[int]]:
        for group in groups:
            await asyncio.wait_for(self.ended[group].wait(), 60)
        return [self.tokens[group] for group in groups]


def random_adapter(seed: int, adaptable: Any, path: Path) -> Path:
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return generator.normal(size=shape).astype(np.float32) * np.float32(0.3)

    weights = {
        name: AdaptedWeight(normal(4 + seed, inputs), normal(outputs, 4 + seed), None, 0.5)
        for name, (inputs, outputs) in adaptable.items()
        if ".layers." in name
    }
    pack(Adapter(weights), path)
    return path


@pytest.mark.parametrize("tp", [1, 2])
async def test_ranks_keep_and_forget_adapters(tp: int, tmp_path: Path) -> None:
    ranks = Ranks(tp)
    try:
        ready = await ranks.group.start()
        adaptable = ready[0].adaptable
        assert all(rank.adaptable == adaptable for rank in ready)
        assert any(name.endswith("q_proj") for name in adaptable)
        paths = [random_adapter(seed, adaptable, tmp_path / str(seed)) for seed in range(2)]
        ranks.submit(1, 0)
        (plain,) = await ranks.answers(1)
        ranks.group.send(MapAdapter(1, str(paths[0])))
        ranks.submit(2, 1)
        (first,) = await ranks.answers(2)
        ranks.submit(3, 0)  # meanwhile another adapter comes
        ranks.submit(4, 1)
        ranks.group.send(MapAdapter(2, str(paths[1])))
        paths[0].unlink()  # what is mapped stays
        ranks.submit(5, 2)
        among = await ranks.answers(3, 4, 5)
        assert among[:2] == [plain, first]
        assert len({tuple(tokens) for tokens in (plain, first, among[2])}) == 3
        ranks.group.send(DropAdapter(1))
        ranks.group.send(DropAdapter(2))
        ranks.group.send(MapAdapter(1, str(paths[1])))
        await asyncio.wait_for(ranks.group.obeyed(), 30)
        paths[1].unlink()  # all ranks have mapped it, though none has used it
        ranks.submit(6, 0)
        ranks.submit(7, 1, content=2)
        assert await ranks.answers(6, 7) == [plain, among[2]]
    finally:
        await ranks.group.end(graceful=False)
        await asyncio.wait_for(ranks.group.obeyed(), 1)
        await ranks.server.close()
