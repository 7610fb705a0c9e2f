"""Answers of a node beside vLLM, cut and continued: the rest is the undisturbed one, and that of our own engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import ChoiceProgress

PROMPT = TokenPrompt((300, 7, 451, 12, 9))
BASE: dict[str, Any] = {"prompt": PROMPT, "seed": 2026, "max_tokens": 32, "ignore_eos": True, "logprobs": 3}
SCHEMA = Constraint.json_schema(
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},'
    ' "required": ["name", "age"], "additionalProperties": false}'
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "min tokens and stops": {
        "temperature": 1.0,
        "min_tokens": 20,
        "ignore_eos": False,
        "stop_token_ids": (*range(0, 4096, 70),),
    },
    "bias": {"temperature": 1.0, "logit_bias": ((5, 6.0), (9, -100.0))},
    "three choices": {"temperature": 1.0, "n": 3},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": tuple(range(100, 140))},
    "bad words": {"temperature": 1.0, "bad_words": ("the", "a", "er")},
    "JSON schema": {"temperature": 1.0, "constraint": SCHEMA, "ignore_eos": False, "max_tokens": 48},
    "JSON schema that is cut off": {"temperature": 1.0, "constraint": SCHEMA, "max_tokens": 20},
    "greedy JSON object": {"temperature": 0.0, "constraint": Constraint.json_object(), "presence_penalty": 0.5},
    "choice of texts, complete with its last token": {
        "temperature": 1.0,
        "constraint": Constraint.choice(["yes", "no, never"]),
    },
    "regular expression that may go on": {
        "temperature": 1.0,
        "constraint": Constraint.regex("[a-c]{2,30}"),
        "ignore_eos": False,
    },
    "three constrained choices": {"temperature": 1.0, "constraint": Constraint.regex("([0-9]{2}-){1,12}"), "n": 3, "seed": 7},
    "constraint and a bias": {
        "temperature": 1.0,
        "constraint": Constraint.regex(".{9,}"),
        "logit_bias": ((5, 6.0),),
        "top_k": 9,
    },
}
CUTS = (1, 17, 31)


def cut(whole: Any, n: int, at: int) -> list[ChoiceProgress] | None:
    """What was generated before the cut; None if nothing is left to continue."""
    known = [ChoiceProgress(tuple(whole.tokens(choice)[:at]), at > len(whole.tokens(choice)) - 1) for choice in range(n)]
    return None if all(choice.finished for choice in known) else known


def assert_is_rest(rest: Any, whole: Any, known: list[ChoiceProgress]) -> None:
    assert rest.failed is None
    for choice, before in enumerate(known):
        if before.finished:
            continue
        assert rest.rows[choice] == whole.rows[choice][len(before.token_ids) :]
        assert rest.finished[choice].reason == whole.finished[choice].reason
    for place, logprobs in rest.logprobs.items():
        assert logprobs.logprob == pytest.approx(whole.logprobs[place].logprob, abs=1e-4)
        assert [top.token_id for top in logprobs.top] == [top.token_id for top in whole.logprobs[place].top]


@pytest.fixture(scope="module")
def nodes(vllm: Any, model: Any, node_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A node beside vLLM, and one with ranks of its own."""
    folder = tmp_path_factory.mktemp("nodes")
    beside = node_process(folder / "vllm.log", "--engine", vllm.url, "--model-name", "demo", model=model)
    own = node_process(folder / "own.log", "--model-name", "demo", model=model, tp=1)
    try:
        for node in (beside, own):
            node.wait_event("ranks ready")
        yield beside, own
    finally:
        beside.close()
        own.close()


@pytest.mark.parametrize("name", CASES)
async def test_every_cut_continues_and_equals_our_own_engine(nodes: Any, connect: Any, attempt: Any, name: str) -> None:
    params = BASE | CASES[name]
    beside, own = nodes
    async with connect(beside.address) as link, connect(own.address) as ours:
        whole = await link.run(attempt(**params), 120)
        assert whole.failed is None
        expected = await ours.run(attempt(**params), 120)
        assert whole.rows == expected.rows, f"{whole.rows} {expected.rows}"
        assert {c: end.reason for c, end in whole.finished.items()} == {c: end.reason for c, end in expected.finished.items()}
        for place, logprobs in whole.logprobs.items():
            assert logprobs.logprob == pytest.approx(expected.logprobs[place].logprob, abs=1e-3)
        cuts = [known for at in CUTS if (known := cut(whole, params.get("n", 1), at)) is not None]
        assert cuts
        for other in (link, ours):
            runs = (other.run(attempt(known=known, number=1, **params), 120) for known in cuts)
            for known, rest in zip(cuts, await asyncio.gather(*runs), strict=True):
                if other is link:
                    assert_is_rest(rest, whole, known)
                else:
                    assert rest.rows == {c: whole.rows[c][len(known[c].token_ids) :] for c in rest.rows}


@pytest.mark.parametrize("num_top", [0, 3])
async def test_prompts_are_scored_as_by_our_own_engine(nodes: Any, connect: Any, attempt: Any, num_top: int) -> None:
    beside, own = nodes
    params = BASE | {"prompt_logprobs": num_top, "max_tokens": 4, "prompt": TokenPrompt(tuple(range(300, 470)))}
    async with connect(beside.address) as link, connect(own.address) as ours:
        got, expected = await link.run(attempt(**params), 120), await ours.run(attempt(**params), 120)
    assert got.rows == expected.rows
    scored, wanted = ([token for part in each.prompt_parts for token in part.tokens] for each in (got, expected))
    assert [token.token_id for token in scored] == list(range(300, 470))
    for one, other in zip(scored, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [top.token_id for top in one.top] == [top.token_id for top in other.top]


async def test_the_node_says_what_computes_and_what_that_lacks(nodes: Any, connect: Any) -> None:
    async with connect(nodes[0].address) as link:
        beat = link.hello.beat
        assert beat.engine.startswith("vllm 0.")
        assert "sampler" in beat.engine
        assert not beat.continues_inexactly
        assert set(beat.unsupported) == {"embeddings"}


@pytest.mark.parametrize("constrained", [False, True])
async def test_forty_requests_at_once_keep_their_own_tokens(nodes: Any, connect: Any, attempt: Any, constrained: bool) -> None:
    """More than vLLM runs at once; each with other parameters, prompt and seed."""
    beside, own = nodes
    cases = [BASE | case for case in CASES.values() if "n" not in case and ("constraint" in case) is constrained]
    others = ({"seed": i, "prompt": TokenPrompt((300, 7, i + 1)), "max_tokens": 8 + i % 9, "min_tokens": 0} for i in range(40))
    asked = [attempt(**cases[i % len(cases)] | each) for i, each in enumerate(others)]
    async with connect(beside.address) as link, connect(own.address) as ours:
        got = await asyncio.gather(*(link.run(each, 240) for each in asked))
        expected = await asyncio.gather(*(ours.run(each, 240) for each in asked))
    differ = [i for i, (one, other) in enumerate(zip(got, expected, strict=True)) if one.tokens() != other.tokens()]
    assert differ == [], [(got[i].tokens(), expected[i].tokens()) for i in differ]
