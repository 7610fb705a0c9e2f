"""Constrained answers of a real node: two ranks, many at once, several choices, cut anywhere, with too few blocks.

The judge is jsonschema.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from typing import Any

import jsonschema
import pytest
from tests.worker.constraints.random_schemas import random_schema
from tests.worker.test_continuation import assert_every_cut_continues

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import CONSTRAINTS
from ryzanstein.generation.tokens import FinishReason

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NUM_SCHEMAS = 40
NOISE = TokenPrompt((300, 7, 451))


def schema(value: Any) -> Constraint:
    return Constraint.json_schema(json.dumps(value))


async def valid_share(link: Any, attempt: Any, seeds: range, **params: Any) -> float:
    """Runs all at once; asserts that what ended is valid, and returns the share of choices that ended."""
    schemas = [random_schema(seed) for seed in seeds]
    attempts = (
        attempt(constraint=schema(each), seed=seed, **{"max_tokens": 300, "temperature": 1.0, "prompt": NOISE, **params})
        for seed, each in zip(seeds, schemas, strict=True)
    )
    streams = await asyncio.gather(*(link.run(each, timeout_s=110) for each in attempts))
    ends = []
    for stream, each in zip(streams, schemas, strict=True):
        assert stream.failed is None, (each, stream.failed)
        for choice, end in stream.finished.items():
            ends.append(end.reason == FinishReason.STOP)
            if ends[-1]:
                jsonschema.validate(json.loads(stream.text(choice)), each, cls=jsonschema.Draft202012Validator)
    return sum(ends) / len(ends)


async def test_answers_to_random_schemas_are_valid(link: Any, attempt: Any) -> None:
    assert await valid_share(link, attempt, range(NUM_SCHEMAS)) > 0.9


async def test_each_choice_has_a_state_of_its_own(link: Any, attempt: Any) -> None:
    assert await valid_share(link, attempt, range(100, 106), n=4, temperature=1.5) > 0.8


async def test_answers_are_valid_although_sequences_are_paused(start_node: Any, connect: Any, attempt: Any) -> None:
    node = start_node("--num-blocks", "24", "--max-waiting", "256", tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        assert await valid_share(link, attempt, range(200, 216), n=2, max_tokens=200) > 0.8
    preempted = [line for line in metrics(node) if line.startswith("ryzanstein_worker_preemptions_total")]
    assert float(preempted[0].split()[1]) > 0


def metrics(node: Any) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=5) as response:
        return response.read().decode().splitlines()


async def test_an_answer_cut_anywhere_goes_on_exactly(link: Any, attempt: Any) -> None:
    whole = await assert_every_cut_continues(
        link, attempt, constraint=schema(random_schema(1)), temperature=1.3, seed=5, max_tokens=60, prompt=NOISE, logprobs=2
    )
    assert len(whole.tokens()) > 3


async def test_a_greedy_answer_is_constrained_too(link: Any, attempt: Any) -> None:
    stream = await link.run(attempt(constraint=Constraint.choice(("Zebra", "Xylophone"))))
    assert stream.text() in ("Zebra", "Xylophone")
    assert stream.finished[0].reason == FinishReason.STOP


async def test_an_answer_that_is_too_long_is_cut(link: Any, attempt: Any) -> None:
    stream = await link.run(attempt(constraint=Constraint.regex("[a-z]{500}"), max_tokens=5))
    assert stream.finished[0].reason == FinishReason.LENGTH
    assert len(stream.tokens()) == 5


async def test_other_parameters_do_not_break_a_constraint(link: Any, attempt: Any, text_model: Any) -> None:
    end = next(iter(text_model.eos_token_ids))
    digits = Constraint.regex("[0-9]{1,3}")
    for params in (
        {"min_tokens": 20},
        {"ignore_eos": True},
        {"logit_bias": ((end, 100.0),)},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
        {"temperature": 2.0, "top_p": 0.1, "top_k": 1},
        {"temperature": 2.0, "min_p": 0.9},
    ):
        stream = await link.run(attempt(constraint=digits, max_tokens=30, **params))
        assert stream.failed is None
        assert stream.text().isdigit(), params
        assert 1 <= len(stream.text()) <= 3
        assert stream.finished[0].reason == FinishReason.STOP


async def test_stop_strings_and_tokens_still_end_an_answer(link: Any, attempt: Any) -> None:
    stream = await link.run(attempt(constraint=Constraint.regex("abcdef"), stop=("cd",)))
    assert stream.text() == "ab"
    assert stream.finished[0].reason == FinishReason.STOP


async def test_what_cannot_be_enforced_is_refused_with_field_and_path(link: Any, attempt: Any) -> None:
    stream = await link.run(attempt(constraint=schema({"properties": {"a": {"not": {"type": "string"}}}})))
    assert stream.failed.reason == "INVALID_CONSTRAINT"
    assert stream.failed.metadata["field"] == "sampling.constraint.json_schema"
    assert "#/properties/a/not" in stream.failed.message
    assert not stream.failed.node_fault


async def test_a_constrained_answer_does_not_change_its_company(link: Any, attempt: Any) -> None:
    alone = await link.run(attempt())
    together = await asyncio.gather(
        link.run(attempt()), *(link.run(attempt(constraint=Constraint.regex("[a-f]{20}"), seed=i)) for i in range(6))
    )
    assert together[0].rows == alone.rows


async def test_a_node_says_that_it_takes_constraints(link: Any) -> None:
    assert CONSTRAINTS in link.hello.features


async def test_copies_of_a_seeded_request_at_once_are_equal_to_the_bit(link: Any, attempt: Any) -> None:
    asked = {"constraint": schema(random_schema(3)), "seed": 9, "temperature": 1.2, "max_tokens": 80, "prompt": NOISE, "n": 2}
    alone = await link.run(attempt(**asked, logprobs=2))
    together = await asyncio.gather(*(link.run(attempt(**asked, logprobs=2)) for _ in range(8)))
    assert len(alone.tokens()) > 3
    assert all((each.rows, each.logprobs) == (alone.rows, alone.logprobs) for each in together)


async def test_an_attempt_that_is_cancelled_while_its_grammar_compiles_leaves_nothing(link: Any, attempt: Any) -> None:
    names = [f"property_{i}" for i in range(60)]
    slow = [schema({"type": "object", "properties": {name: {"enum": [i, *names]} for name in names}}) for i in range(6)]
    handles = [await link.submit(attempt(constraint=each, max_tokens=400)) for each in slow]
    for handle in handles:
        await link.cancel(handle)
    stream = await link.run(attempt(constraint=schema({"const": "after"}), max_tokens=20))
    assert json.loads(stream.text()) == "after"
    assert not any(link.streams[handle].failed for handle in handles)


async def test_a_grammar_that_compiles_delays_nobody_else_and_can_be_cancelled(
    start_node: Any, connect: Any, attempt: Any
) -> None:
    node = start_node(tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        await link.run(attempt(constraint=Constraint.choice(("a",))))
        (pid,) = node.grammar_pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            kept, dropped = [await link.submit(attempt(constraint=Constraint.choice((each,)))) for each in ("b", "c")]
            assert (await link.run(attempt(max_tokens=3))).finished, "who has no constraint does not wait"
            await link.until(lambda: {kept, dropped} <= set(link.beats[-1][1].preparing))
            await link.cancel(dropped)
            await link.until(lambda: set(link.beats[-1][1].preparing) == {kept})
        finally:
            os.kill(pid, signal.SIGCONT)
        stream = await link.wait(kept, lambda s: bool(s.finished))
        assert stream.text() == "b"
        assert not link.streams[dropped].rows
