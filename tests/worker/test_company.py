"""The same seeded request gets the same answer in any company: alone, eight at once beside others, resumed at any index.

A real node for each format, over its Connect stream. Log probabilities are compared bit for bit.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import ChoiceProgress

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NUM_TOKENS = 72
NUM_COPIES = 8
SEEDS = (3, 2026, 77)
FLAGS = {
    "float32": (),
    "fp16": ("--quantization", "fp16"),
    "int8": ("--quantization", "int8"),
    "compressed keys and values": ("--kv-compression", "lazy-fp8"),
}


def seeded(attempt: Any, seed: int, **more: Any) -> Any:
    """The model is not sure of anything after this prompt, and the temperature is high: a wrong bit soon changes a token."""
    rng = random.Random(seed)
    prompt = TokenPrompt(tuple(rng.randrange(260, 480) for _ in range(70 + seed % 9)))
    params = {"prompt": prompt, "temperature": 1.7, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2}
    return attempt(**{**params, **more})


def message(stream: Any) -> list[tuple[int, float]]:
    """Tokens and their log probabilities."""
    assert stream.failed is None
    return [(token, stream.logprobs[0, index].logprob) for index, token, _ in stream.rows[0]]


async def assert_company_changes_nothing(link: Any, attempt: Any, seed: int) -> None:
    alone = message(await link.run(seeded(attempt, seed), timeout_s=60))
    assert len(alone) == NUM_TOKENS
    others = [link.run(seeded(attempt, 1000 + n, max_tokens=9 + 11 * n), timeout_s=100) for n in range(4)]
    copies = [link.run(seeded(attempt, seed), timeout_s=100) for _ in range(NUM_COPIES)]
    for stream in (await asyncio.gather(*copies, *others))[:NUM_COPIES]:
        assert message(stream) == alone


async def assert_resumed_answers_go_on(link: Any, attempt: Any, seed: int) -> None:
    alone = message(await link.run(seeded(attempt, seed), timeout_s=60))
    cuts = sorted(random.Random(seed).sample(range(1, NUM_TOKENS), 6))
    progress = [[ChoiceProgress(tuple(token for token, _ in alone[:cut]))] for cut in cuts]
    rests = await asyncio.gather(*(link.run(seeded(attempt, seed, known=known, number=1), timeout_s=100) for known in progress))
    for cut, rest in zip(cuts, rests, strict=True):
        assert message(rest) == alone[cut:], f"cut at {cut}"


@pytest.mark.parametrize("weights", FLAGS)
async def test_a_seeded_request_has_one_answer(start_node: Any, connect: Any, attempt: Any, weights: str) -> None:
    node = start_node(*FLAGS[weights], tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        for seed in SEEDS:
            await assert_company_changes_nothing(link, attempt, seed)
            await assert_resumed_answers_go_on(link, attempt, seed)


async def test_so_it_has_on_two_ranks(link: Any, attempt: Any) -> None:
    await assert_company_changes_nothing(link, attempt, SEEDS[0])
    await assert_resumed_answers_go_on(link, attempt, SEEDS[0])
