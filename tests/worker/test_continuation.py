"""State-complete failover: wherever an answer is cut, a new attempt generates exactly the rest of it.

For every k the attempt starts with the first k tokens of an undisturbed run, over a real node's Connect stream; all of them run
at once, so that they also share batches as after the death of a busy node.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import ChoiceProgress
from ryzanstein.generation.tokens import FinishReason

pytestmark = pytest.mark.cluster

NOISE = TokenPrompt((300, 7, 451))  # the model is sure of what it has learned
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SAMPLED: dict[str, Any] = {
    "prompt": NOISE,
    "temperature": 2.0,
    "seed": 2026,
    "top_p": 0.95,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "min_tokens": 12,
    "logprobs": 3,
    "max_tokens": 40,
}
SLICE_FROM, SLICE_TO = 15, 23


def known(whole: Any, *counts: int) -> list[ChoiceProgress]:
    """The first tokens of each choice; one that has all of them and an end is finished, as the router's log has it."""
    return [
        ChoiceProgress(tuple(whole.tokens(choice)[:count]), finished=count > len(whole.tokens(choice)))
        for choice, count in enumerate(counts)
    ]


def assert_is_rest(rest: Any, whole: Any, counts: tuple[int, ...]) -> None:
    """Rows (index, token id, text), log probabilities, ends and the prompt's size."""
    assert rest.failed is None
    assert rest.prompt_tokens == whole.prompt_tokens
    for choice, count in enumerate(counts):
        assert rest.rows.get(choice, []) == whole.rows[choice][count:], f"choice {choice} cut at {count}"
        if count <= len(whole.tokens(choice)):
            assert rest.finished[choice].reason == whole.finished[choice].reason
    for position, logprobs in rest.logprobs.items():
        expected = whole.logprobs[position]
        assert logprobs.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [top.token_id for top in logprobs.top] == [top.token_id for top in expected.top]
    assert len(rest.logprobs) == (sum(map(len, rest.rows.values())) if whole.logprobs else 0)


async def assert_every_cut_continues(link: Any, attempt: Any, **params: Any) -> Any:
    whole = await link.run(attempt(**params))
    cuts = range(len(whole.tokens()) + 1)
    rests = await asyncio.gather(*(link.run(attempt(known=known(whole, k), number=1, **params)) for k in cuts))
    for k, rest in zip(cuts, rests, strict=True):
        assert_is_rest(rest, whole, (k,))
    return whole


async def test_a_greedy_answer(link, attempt):
    whole = await assert_every_cut_continues(link, attempt, **GREEDY)
    assert len(whole.tokens()) == 40


async def test_an_answer_that_ends_by_itself(link, attempt):
    whole = await assert_every_cut_continues(link, attempt, question="Hello!", max_tokens=200)
    assert whole.finished[0].reason == FinishReason.STOP


async def test_a_sampled_answer_with_penalties_min_tokens_and_logprobs(link, attempt):
    whole = await assert_every_cut_continues(link, attempt, **SAMPLED)
    assert len(whole.tokens()) > 12
    assert len(whole.logprobs) == len(whole.tokens())


async def test_three_choices_each_cut_elsewhere(link, attempt):
    params = {**SAMPLED, "n": 3}
    whole = await link.run(attempt(**params))
    lengths = [len(whole.tokens(choice)) for choice in range(3)]
    assert len({tuple(whole.tokens(choice)) for choice in range(3)}) == 3
    # One more than a choice has tokens: its end was seen too. At least one is left to run.
    cuts = [tuple((k * stride) % (length + 2) for stride, length in zip((1, 5, 7), lengths, strict=True)) for k in range(42)]
    cuts = [cut for cut in cuts if any(count <= length for count, length in zip(cut, lengths, strict=True))]
    rests = await asyncio.gather(*(link.run(attempt(known=known(whole, *cut), number=1, **params)) for cut in cuts))
    for cut, rest in zip(cuts, rests, strict=True):
        assert_is_rest(rest, whole, cut)


async def test_a_stop_string_that_spans_every_cut(link, attempt):
    free = await link.run(attempt(**GREEDY))
    stop = free.text()[SLICE_FROM:SLICE_TO]
    whole = await assert_every_cut_continues(link, attempt, **GREEDY, stop=(stop, stop[::-1]))
    assert whole.finished[0].reason == FinishReason.STOP
    assert whole.text() == free.text()[: free.text().index(stop)]
    spanned = [text for _, _, text in whole.rows[0]].count("")
    assert spanned >= 2, "the stop string must be held back over several tokens"


async def test_text_that_is_split_over_tokens(link, attempt, text_model):
    halves = [i for i in range(text_model.vocab_size) if text_model.decode([i]) == "\ufffd"]
    wanted = [i for i in halves if i in text_model.encode("\u2603\u00e9\u65e5\U0001f600")]
    assert len(wanted) >= 8, "the demo tokenizer spells these characters in bytes"
    bias = tuple((token_id, 100.0) for token_id in wanted)
    whole = await assert_every_cut_continues(
        link, attempt, prompt=NOISE, temperature=2.0, seed=11, max_tokens=48, ignore_eos=True, logit_bias=bias, logprobs=1
    )
    assert set(whole.tokens()) <= set(wanted)
    assert "" in [text for _, _, text in whole.rows[0]], "half a character is held back"
    assert any(character != "\ufffd" for character in whole.text())
    assert whole.text() == text_model.decode(whole.tokens())
