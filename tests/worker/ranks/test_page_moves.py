"""Pages between groups of real ranks: of one and of two ranks, compressed or not, with the same bits of answers."""

from __future__ import annotations

import asyncio
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.agent.pages.mover import PageMover, PagesLost
from ryzanstein.worker.agent.pages.page import Page, PageSizes
from ryzanstein.worker.engine.messages import EngineStats, StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.settings.rank_settings import ModelSettings
from ryzanstein.worker.supervision.group import GroupEvents
from ryzanstein.worker.supervision.messages import PagesAnswer

pytestmark = [pytest.mark.distributed, pytest.mark.long]

DEMO = Path(__file__).parents[3] / "shared" / "ryzanstein" / "demo"
RANK = (sys.executable, "-m", "ryzanstein.worker.ranks.rank")
PROMPT = [(7 + i * i) % 200 for i in range(150)]


class Ranks:
    """One group of a model, its pages, and all tokens that it generated."""

    def __init__(self, tp: int, model: Path = DEMO, threads: int = 1, **settings: Any) -> None:
        self.tokens: list[int] = []
        self.sealed: list[bytes] = []
        self.stats: EngineStats | None = None
        self.ended = asyncio.Event()
        self.tp = tp
        self.server = ForkServer(RANK, {"OMP_NUM_THREADS": "1"})
        events = GroupEvents(self._on_step, lambda trace: None, lambda: False, self._on_pages)
        model_settings = ModelSettings(**{"num_blocks": 64, **settings})
        spec = RankSpec(str(model), tp, model_settings, device="cpu", threads=threads)
        self.group = RankGroup(spec, GroupBounds(start_s=90), events, self.server)

    def _on_step(self, events: StepEvents) -> None:
        self.tokens += events.token_ids
        self.sealed += [key for _, keys in events.sealed for key in keys]
        self.stats = events.stats
        if events.ended:
            self.ended.set()

    def _on_pages(self, answer: PagesAnswer) -> None:
        self.mover.on_answer(answer)

    async def start(self) -> Ranks:
        ready = await self.group.start()
        assert len({(rank.page_bytes, rank.hot_page_bytes, rank.page_format) for rank in ready}) == 1
        self.ready = ready[0]
        sizes = PageSizes(self.ready.page_bytes, self.ready.hot_page_bytes, len(self.ready.windows))
        self.mover = PageMover(self.group, self.tp, sizes, lambda: True)
        return self

    async def run(self, generated: list[int], max_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
        self.tokens = []
        self.ended.clear()
        sampling = SamplingParams(temperature=0.9, seed=11)
        self.group.send(SubmitGroup(1, prompt, sampling, max_tokens, [], [generated], [False], reports_pages=True))
        await asyncio.wait_for(self.ended.wait(), 60)
        return self.tokens

    async def close(self) -> None:
        await self.group.end(graceful=False)
        await self.server.close()


async def move(one: Ranks, two: Ranks) -> None:
    """Moves all pages that the first has reported, in their order."""
    left, parent = one.sealed, b""
    while left:
        size = one.mover.fits(left)
        pages = await one.mover.take(left[:size])
        assert await two.mover.put(pages, parent) == len(pages)
        parent, left = left[size - 1], left[size:]


@pytest.mark.parametrize(("first", "second", "compression"), [(1, 2, "lazy-fp8"), (2, 1, "lazy-fp8"), (1, 1, "eager-fp8")])
async def test_an_answer_goes_on_from_compressed_pages(first, second, compression) -> None:
    given = {"kv_compression": compression, "num_blocks": 200}
    one, two = Ranks(first, **given), Ranks(second, **given)
    try:
        await asyncio.gather(one.start(), two.start())
        assert one.ready.kv_compression == compression
        assert (one.ready.page_format, one.ready.hot_page_bytes) == (two.ready.page_format, two.ready.hot_page_bytes)
        assert one.ready.hot_page_bytes > one.ready.page_bytes > 0
        whole = await one.run([], 60)
        assert sum(name[-1] == 0 for name in one.sealed) == (150 + 60 - 1) // 16
        await move(one, two)
        assert await two.run(whole[:50], 60) == whole[50:]
        assert two.stats is not None
        assert two.stats.prefill_tokens == (150 + 50) % 16
    finally:
        await asyncio.gather(one.close(), two.close())


async def test_threads_and_steps_do_not_change_pages_and_other_ranks_and_kernels_round_otherwise() -> None:
    kinds = [Ranks(1), Ranks(1, threads=2, max_tokens_per_step=64), Ranks(2), Ranks(1, kernels="torch")]
    try:
        for ranks in kinds:
            await ranks.start()
            await ranks.run([], 2)
        one, same, *others = [[page.content for page in await ranks.mover.take(ranks.sealed)] for ranks in kinds]
        assert len(one) == 9
        assert same == one
        for other in others:
            numbers, expected = (torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.float32) for pages in (other, one))
            assert other != one, "docs/concepts/kv-replication.md says that they differ"
            assert torch.allclose(numbers, expected, rtol=0, atol=1e-4)
    finally:
        await asyncio.gather(*(ranks.close() for ranks in kinds))


async def test_an_answer_goes_on_from_the_pages_of_a_model_with_windows(tmp_path) -> None:
    prompt = [(7 + i * i) % 200 for i in range(400)]
    one, two = (Ranks(tp, with_windows(tmp_path / str(tp)), num_blocks=400) for tp in (1, 2))
    try:
        await asyncio.gather(one.start(), two.start())
        assert {window is None for window in one.ready.windows} == {True, False}
        whole = await one.run([], 60, prompt)
        num_windows = len(one.ready.windows) - 1
        windowed = sum(one.ready.windows[name[-1]] is not None for name in one.sealed)
        assert 0 < windowed < num_windows * ((400 + 60) // 16) / 2, "those that an answer is resumed with"
        await move(one, two)
        assert await two.run(whole[:50], 60, prompt) == whole[50:]
        assert two.stats is not None
        assert two.stats.prefill_tokens == (400 + 50) % 16
    finally:
        await asyncio.gather(one.close(), two.close())


def with_windows(model: Path) -> Path:
    """Writes a random Gemma 3: five of six layers see 64 tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(3)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
        config = Gemma3TextConfig(vocab_size=256, num_hidden_layers=6, sliding_window=64, max_position_embeddings=1024, **sizes)
        made = Gemma3ForCausalLM(config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.08)
        made.save_pretrained(model)
    return model


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
async def test_an_answer_goes_on_from_pages_of_ranks_that_share_the_heads_otherwise(first, second) -> None:
    one, two = Ranks(first), Ranks(second)
    try:
        await asyncio.gather(one.start(), two.start())
        assert (one.ready.page_bytes, one.ready.page_format) == (two.ready.page_bytes, two.ready.page_format)
        whole = await one.run([], 60)
        keys = one.sealed
        assert len(keys) == (150 + 60 - 1) // 16
        assert await two.mover.missing(keys) == list(range(len(keys)))
        pages, left = [], keys
        while left:
            taken = await one.mover.take(left)
            pages += taken
            left = left[len(taken) :]
        assert [page.key for page in pages] == keys
        assert await two.mover.put(pages, b"") == len(keys)
        assert await two.mover.missing([*keys, b"no such key......"]) == [len(keys)]
        assert [page.content for page in await two.mover.take(keys[:1])] == [pages[0].content]
        assert await two.run(whole[:50], 60) == whole[50:]
        assert two.stats is not None
        assert two.stats.prefill_tokens == (150 + 50) % 16
    finally:
        await asyncio.gather(one.close(), two.close())


async def test_ranks_that_are_gone_answer_nobody_and_a_cancelled_move_leaves_the_slab_whole() -> None:
    it = Ranks(1)
    try:
        await it.start()
        page = Page(b"k" * 16 + b"\0", bytes([1]) * it.ready.page_bytes)
        task = asyncio.ensure_future(it.mover.put([page], b""))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        other = Page(b"l" * 16 + b"\0", bytes([2]) * it.ready.page_bytes)
        assert await it.mover.put([other], b"") == 1
        assert await it.mover.take([page.key]) + await it.mover.take([other.key]) == [page, other]
        waiting = asyncio.ensure_future(it.mover.missing([b"x"]))
        await asyncio.sleep(0)
        it.mover.on_gone()
        with pytest.raises(PagesLost):
            await waiting
        with pytest.raises(PagesLost):
            await it.mover.take([b"x"])
    finally:
        await it.close()
