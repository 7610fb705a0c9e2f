"""Constraints in a server with our sampler: from the node's request to the token that ends the choice, against our own engine.

The server is a socket before the sampler itself; what the model computes is a function of the tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.engines.recorded import DONE, vllm_event
from tests.worker.engines.stub_server import EVENTS, Exchange, Stub, stub_server
from tests.worker.engines.test_remote_group import Heard, be_vllm, engines_of, started
from tests.worker.engines.vllm_batches import VOCABULARY, Batch, Slots, argued, logits_after, sampler_class

from ryzanstein.constraints import Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import Bits, GrammarState
from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.engine.messages import SetTokens, SubmitGroup
from ryzanstein.worker.engine.sequence import Account, Sequence, SequenceGroup
from ryzanstein.worker.engines.asking import READY, UNKNOWN, WAIT, AskedRow, ConstraintEnd, asked_row, table_name, unpacked
from ryzanstein.worker.engines.remote.answers.constrained import constrained
from ryzanstein.worker.engines.remote.asked import ComputedPart, ComputedToken
from ryzanstein.worker.sampling.sampler import sample

__all__ = ["sampler_class"]

EOS = VOCABULARY - 1
TOKENS = [bytes([i]) for i in range(9, 128)]
TOKENS += [f"{first}{second}".encode() for first in "abcdefghi" for second in "aeiou0123"][: EOS - len(TOKENS)]
TOKENS += [b""] * (EOS - len(TOKENS)) + [b"<eos>"]
TABLE = TokenTable(TOKENS, [EOS], [EOS])
PACKED = TABLE.encode()
SCHEMA = Constraint.json_schema('{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}')
CASES = {
    "schema": SamplingParams(temperature=1.0, constraint=SCHEMA),
    "greedy schema": SamplingParams(temperature=0.0, constraint=SCHEMA, presence_penalty=0.5),
    "choice": SamplingParams(temperature=1.0, constraint=Constraint.choice(["yes", "no, never", "perhaps"])),
    "open expression": SamplingParams(temperature=1.0, constraint=Constraint.regex("[a-c]{2,30}"), top_p=0.9),
    "exactly as long as was asked": SamplingParams(temperature=1.0, constraint=Constraint.regex("(~{2}){12}|[x-z]{24}")),
    "longer than was asked": SamplingParams(temperature=1.0, constraint=Constraint.regex("[x-z]{25}")),
    "no end of text": SamplingParams(temperature=1.0, constraint=Constraint.regex("[a-z]+"), ignore_eos=True),
    "allowed": SamplingParams(temperature=1.0, constraint=Constraint.regex("[a-z]{3,}"), allowed_token_ids=(*range(99, 110),)),
    "nothing is allowed": SamplingParams(temperature=1.0, constraint=Constraint.regex("[A-C]+"), allowed_token_ids=(1, 2)),
}


def submitted(sampling: SamplingParams, seed: int, max_tokens: int = 24, n: int = 1) -> SubmitGroup:
    sampling = replace(sampling, seed=seed, n=n)
    stops = [] if sampling.ignore_eos else [EOS]
    return SubmitGroup(1, [5, 9], sampling, max_tokens, stops, [[] for _ in range(n)], [False] * n)


def our_answer(message: SubmitGroup, choice: int = 0) -> tuple[list[int], FinishReason | str]:
    """The tokens of our own engine, and why it ends there."""
    matcher = compiled(message.sampling.constraint, TABLE, TABLE.tokenizer())  # type: ignore[arg-type]
    state = GrammarState(matcher, Bits(TABLE), message.generated[choice], keeps_on=message.sampling.ignore_eos)
    sequence, masks = Sequence(SequenceGroup(message, 0, 0.0, Account("")), choice, state), StepMasks(VOCABULARY, 1)
    while True:
        masks.begin([sequence.row])
        logits = logits_after([*message.prompt_ids, *sequence.generated])
        (token,) = sample(logits.unsqueeze(0), [sequence.row], allowed_SW=masks.wait())
        before = list(sequence.generated)
        reason = sequence.append(token.token_id)
        if sequence.failure:
            return before, sequence.failure
        if reason is not None:
            return sequence.generated, reason


class Vllm:
    """The sampler behind `/v1/completions`: one batch of all requests, a step at a time."""

    def __init__(self, sampler: Any) -> None:
        self.batch = Batch(sampler)
        self.rows: list[AskedRow] = []

    async def complete(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"))
        if (row := unpacked(params.extra_args)) is not None and not row.probes:
            self.rows.append(row)
        output, told = self.batch.add(params, body["prompt"]), 0
        await exchange.send(EVENTS)
        try:
            while told < body["max_tokens"] and not exchange.gone.is_set():
                if len(output) == told:
                    self.batch.step()
                    await asyncio.sleep(0)
                    continue
                last = told + 1 == body["max_tokens"]
                event = vllm_event([output[told]], told + 1, "length" if last else None)
                event["usage"]["prompt_tokens"] = len(body["prompt"])
                await exchange.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
                told += 1
        finally:
            self.batch.remove(output)
        await exchange.chunk(b"data: " + DONE + b"\n\n")
        await exchange.send(b"0\r\n\r\n")


@pytest.fixture
async def vllm(sampler_class: Any) -> AsyncIterator[tuple[Stub, Vllm]]:
    async with stub_server() as stub:
        be_vllm(stub)
        server = Vllm(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
        stub.behaviours["/v1/completions"] = server.complete
        yield stub, server


@pytest.mark.parametrize("name", CASES)
async def test_a_constrained_choice_ends_as_in_our_own_engine(vllm: tuple[Stub, Vllm], name: str) -> None:
    stub, server = vllm
    heard = Heard()
    message = submitted(CASES[name], seed=3)
    async with started(engines_of(stub, heard, vocabulary=VOCABULARY)) as (group, ready):
        assert "constraint" not in ready.unsupported
        group.send(SetTokens(PACKED))
        tokens, reason = our_answer(message)
        for cut in (0, len(tokens) // 2, max(len(tokens) - 1, 0)):
            known = tokens[:cut]
            group.send(msgspec.structs.replace(message, group=10 + cut, generated=[known]))
            await heard.until(lambda cut=cut: 10 + cut in heard.reasons or 10 + cut in heard.failed)
            assert [*known, *heard.tokens.get(10 + cut, [])] == tokens
            if isinstance(reason, str):
                assert heard.failed[10 + cut] == "CONSTRAINT_FAILED"
                assert reason in heard.messages[10 + cut]
            else:
                assert heard.reasons[10 + cut] == reason
    assert sum(bool(row.tokens) for row in server.rows) == len({row.tokens for row in server.rows if row.tokens}) == 1


def test_what_is_not_known_is_not_prepared(sampler_class: Any) -> None:
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    message = submitted(CASES["schema"], seed=1)
    wants = asked_row(message, 0, table_name(PACKED), prepares=True)
    assert answered(batch, wants)[0] == UNKNOWN
    assert answered(batch, AskedRow(tokens=b"no table", prepares=True))[0] == UNKNOWN
    assert answered(batch, AskedRow(tokens=PACKED, prepares=True)) == [READY, EOS]
    assert answered(batch, wants)[0] == READY


def test_a_choice_whose_table_was_forgotten_says_so(sampler_class: Any) -> None:
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    output = batch.add(argued(asked_row(submitted(CASES["schema"], seed=1), 0, table_name(PACKED), EOS)), [5, 9])
    other = batch.add(argued(asked_row(submitted(SamplingParams(), seed=1), 0)), [5, 9])
    for _ in range(3):
        batch.step()
    assert output == [EOS, ConstraintEnd.NOT_COMPILED, ConstraintEnd.NOT_COMPILED]
    assert len(other) == 3


def answered(batch: Batch, row: AskedRow) -> list[int]:
    """Asks until the answer is not that it takes longer."""
    for _ in range(2000):
        output = batch.add(argued(row), [1, 2, 3])
        batch.step()
        batch.step()
        batch.remove(output)
        batch.step()
        if output[0] != WAIT:
            return output[:2]
    raise AssertionError("it is never ready")


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing is allowed"])
def test_the_second_interface_decides_alike(sampler_class: Any, name: str) -> None:
    message = submitted(CASES[name], seed=5)
    tokens, _ = our_answer(message)
    slots = Slots(sampler_class)
    known = AskedRow(tokens=PACKED, prepares=True)
    while slots.tokens.gpu[1, 3].item() != READY:
        assert slots.add(1, argued(known), [1, 2, 3])
        slots.step([1], {})
    assert slots.add(2, argued(asked_row(message, 0, table_name(PACKED), EOS)), [*message.prompt_ids, *tokens[:1]])
    slots.step([2, 1], {2: 1})
    while slots.length[2] < 2 + len(tokens):
        slots.step([1, 2] if slots.length[2] % 2 else [2, 1], {})
    assert slots.tokens.gpu[2, 2 : 2 + len(tokens)].tolist() == tokens


async def test_a_server_that_was_restarted_is_told_the_tokens_again(vllm: tuple[Stub, Vllm], sampler_class: Any) -> None:
    stub, server = vllm
    heard = Heard()
    message = submitted(CASES["choice"], seed=3)
    async with started(engines_of(stub, heard, vocabulary=VOCABULARY)) as (group, _):
        group.send(SetTokens(PACKED))
        for number in (1, 2, 3):
            group.send(msgspec.structs.replace(message, group=number))
            await heard.until(lambda number=number: number in heard.reasons or number in heard.failed)
            if number == 1:
                server.batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
        assert heard.failed == {2: "ENGINE_UNREACHABLE"}
        assert heard.tokens[3] == heard.tokens[1]
        assert not group.lost.done()


@pytest.mark.parametrize("escape", [VOCABULARY, 10**12, -1])
def test_an_escape_token_of_no_vocabulary_harms_no_other_choice(sampler_class: Any, escape: int) -> None:
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    batch.add(argued(asked_row(submitted(CASES["schema"], seed=1), 0, b"none", escape)), [5, 9])
    other = submitted(SamplingParams(temperature=1.0), seed=1)
    output = batch.add(argued(asked_row(other, 0)), [5, 9])
    alone = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    expected = alone.add(argued(asked_row(other, 0)), [5, 9])
    for _ in range(4):
        batch.step()
        alone.step()
    assert output == expected


def test_a_table_that_was_dropped_for_others_is_not_known(sampler_class: Any) -> None:
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    tables = [TokenTable([*TOKENS[:-1], f"<end {i}>".encode()], [EOS], [EOS]).encode() for i in range(6)]
    for table in tables:
        output = batch.add(argued(AskedRow(tokens=table, prepares=True)), [1])
        batch.step()
        assert output[0] in (READY, WAIT)
    assert answered(batch, AskedRow(table=table_name(tables[0]), prepares=True))[0] == UNKNOWN
    assert answered(batch, AskedRow(table=table_name(tables[-1]), prepares=True)) == [READY, EOS]


async def test_logits_that_are_not_finite_end_a_constrained_choice_alone(vllm: tuple[Stub, Vllm], monkeypatch: Any) -> None:
    stub, _ = vllm
    monkeypatch.setattr("tests.worker.engines.vllm_batches.logits_after", lambda _: torch.full((VOCABULARY,), torch.nan))
    heard = Heard()
    async with started(engines_of(stub, heard, vocabulary=VOCABULARY)) as (group, _):
        group.send(SetTokens(PACKED))
        group.send(submitted(CASES["schema"], seed=3))
        await heard.until(lambda: heard.failed)
        assert heard.failed == {1: "LOGITS_NOT_FINITE"}
        assert not group.lost.done()


async def ends_of(max_tokens: int, *token_ids: int) -> tuple[list[int], str]:
    """What comes of these tokens, each in an event; the server ends with "length" after them."""

    async def parts() -> AsyncIterator[ComputedPart]:
        for token_id in token_ids:
            yield ComputedPart([ComputedToken(token_id)])
        yield ComputedPart(finish="length")

    got, finish = [], ""
    async for part in constrained(parts(), EOS, max_tokens):  # type: ignore[arg-type]
        got += [token.token_id for token in part.tokens]
        finish = part.finish
    return got, finish


async def test_only_what_follows_the_escape_token_says_how_a_choice_ends() -> None:
    assert await ends_of(9, 1, 2, EOS, ConstraintEnd.DRAWN, 7) == ([1, 2, EOS], "stop")
    assert await ends_of(9, 1, 2, EOS, ConstraintEnd.COMPLETE, 7) == ([1, 2], "stop")
    assert await ends_of(2, 1, 2, EOS, ConstraintEnd.COMPLETE) == ([1, 2], "stop")
    assert await ends_of(2, 1, 2, EOS, ConstraintEnd.DRAWN) == ([1, 2], "length")
    assert await ends_of(2, 1, 2, EOS, ConstraintEnd.TOO_SLOW) == ([1, 2], "length"), "that would have been later"
    assert await ends_of(2, 1, 2, 3, 4) == ([1, 2], "length")
    assert await ends_of(3, 1, 2, EOS, ConstraintEnd.DRAWN) == ([1, 2, EOS], "stop")
    assert await ends_of(9, EOS, ConstraintEnd.COMPLETE) == ([], "stop")
    assert await ends_of(2, 1, 2) == ([1, 2], "length"), "the context has no room for more"
    assert await ends_of(3, 1, 2, EOS) == ([1, 2, EOS], "stop")
    for ending in (ConstraintEnd.TOO_SLOW, ConstraintEnd.UNSATISFIED, ConstraintEnd.TOO_COMPLEX, ConstraintEnd.NAMES_THE_END):
        with pytest.raises(RyzansteinError, match="constraint"):
            await ends_of(9, 1, EOS, ending)
