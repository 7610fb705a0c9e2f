"""The logits processor of vLLM, driven by both of its interfaces, against the sampler of our own engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tests.worker.engines.vllm_batches import VOCABULARY, Batch, BatchUpdate, Slots, argued, logits_after, sampler_class

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.constraints.guidance import guidance_version
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.sequence import Account, Sequence, SequenceGroup
from ryzanstein.worker.engines.asking import ARGUMENT, NUM_PROBED, PROBE, PROTOCOL, SIGN, AskedRow, asked_row, packed
from ryzanstein.worker.engines.vllm.board import VARIABLE, failures
from ryzanstein.worker.sampling.sampler import sample

__all__ = ["sampler_class"]

CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=7),
    "top-p": SamplingParams(temperature=1.2, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    "greedy penalties": SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5),
    "greedy": SamplingParams(temperature=0.0),
    "min tokens": SamplingParams(temperature=1.0, min_tokens=12),
    "bias": SamplingParams(temperature=0.0, logit_bias=((3, 4.0), (9, -100.0))),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(2, 3, 5, 7, 11)),
    "log probabilities": SamplingParams(temperature=1.0, logprobs=5),
}

FREE = ("temperature", "top-k", "top-p", "min-p", "log probabilities")
"""Drawn from the model's own logits: only the number of tokens before counts."""


def submitted(sampling: SamplingParams, prompt: list[int], seed: int, max_tokens: int = 24) -> SubmitGroup:
    sampling = replace(sampling, seed=seed)
    return SubmitGroup(1, prompt, sampling, max_tokens, [4, 6], [[] for _ in range(sampling.n)], [False] * sampling.n)


def replace_seed(seed: int | None) -> SubmitGroup:
    return SubmitGroup(1, [1], SamplingParams(seed=seed), 4, [], [[]], [False])


def our_answer(message: SubmitGroup, choice: int = 0, dtype: torch.dtype = torch.float32) -> list[int]:
    sequence = Sequence(SequenceGroup(message, 0, 0.0, Account("")), choice)
    while True:
        logits = logits_after([*message.prompt_ids, *sequence.generated]).to(dtype)
        (token,) = sample(logits.float().unsqueeze(0), [sequence.row])
        if sequence.append(token.token_id) is not None:
            return sequence.generated


@pytest.mark.parametrize("cut", [0, 1, 7, 17])
@pytest.mark.parametrize("name", CASES)
def test_every_token_is_that_of_our_engine_also_after_a_move(sampler_class, name: str, cut: int) -> None:
    message = submitted(CASES[name], [5, 9, 9, 31], seed=77)
    whole = our_answer(message)
    cut = min(cut, len(whole) - 1)
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    output = batch.add(argued(asked_row(message, 0)), [*message.prompt_ids, *whole[:cut]])
    for _ in range(len(whole) - cut):
        batch.step()
    assert output == whole[cut:]


def test_requests_that_enter_leave_and_move_keep_their_own_tokens(sampler_class) -> None:
    chance = random.Random(5)
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    running: list[tuple[list[int], list[int]]] = []
    done = 0
    for number in range(400):
        if len(running) < 9 and chance.random() < 0.5:
            sampling = replace(chance.choice(list(CASES.values())), n=2)
            message = submitted(sampling, [number % VOCABULARY, *range(chance.randrange(1, 5))], seed=number)
            choice = chance.randrange(2)
            running.append((our_answer(message, choice), batch.add(argued(asked_row(message, choice)), message.prompt_ids)))
        if chance.random() < 0.1:
            strangers = SimpleNamespace(extra_args=None)
            running.append(([], batch.add(strangers, [1, 2, 3])))
        batch.step(chance)
        for answer, output in list(running):
            assert not answer or output == answer[: len(output)]
            if len(output) >= (len(answer) or 3):
                batch.remove(output)
                running.remove((answer, output))
                done += bool(answer)
    assert done > 30


def test_other_requests_are_left_alone(sampler_class) -> None:
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    params = SimpleNamespace(extra_args={"another": "argument"})
    sampler.update_state(BatchUpdate(1, added=((0, params, [1, 2], []),)))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(sampler.apply(logits.clone()), logits)
    assert not sampler.is_argmax_invariant()


def test_a_row_without_finite_logits_does_not_stop_the_others(sampler_class) -> None:
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    message = submitted(CASES["temperature"], [5], seed=1)
    added = [(place, argued(asked_row(message, 0)), [5], []) for place in range(2)]
    sampler.update_state(BatchUpdate(2, added=tuple(added)))
    logits = torch.stack([torch.full((VOCABULARY,), torch.nan), logits_after([5])])
    assert sampler.apply(logits)[1].argmax() == our_answer(message)[0]


def test_a_probe_is_told_what_answers_it(sampler_class) -> None:
    batch = Batch(sampler_class(SimpleNamespace(), torch.device("cpu"), False))
    output = batch.add(SimpleNamespace(extra_args={PROBE: "protocol"}), [1])
    for _ in range(NUM_PROBED):
        batch.step()
    assert output == [*SIGN, PROTOCOL, *guidance_version()]


@pytest.mark.parametrize("value", [7, "no base64!", "AAAA", packed(AskedRow())[ARGUMENT][:-4]])
def test_arguments_that_no_agent_sends_are_refused_before_they_reach_a_batch(sampler_class, value: object) -> None:
    with pytest.raises(ValueError, match=ARGUMENT):
        sampler_class.validate_params(SimpleNamespace(extra_args={ARGUMENT: value}))
    sampler_class.validate_params(SimpleNamespace(extra_args=None))
    sampler_class.validate_params(argued(AskedRow(prepares=True)))


@pytest.mark.parametrize(
    "row",
    [
        asked_row(submitted(SamplingParams(temperature=-1.0), [1], seed=1), 0),
        asked_row(submitted(SamplingParams(), [1], seed=1), 3),
        AskedRow(replace_seed(None), 0, 1),
        AskedRow(replace_seed(1), 0, 0),
    ],
)
def test_rows_that_cannot_be_decided_are_refused_before_they_reach_a_batch(sampler_class, row: AskedRow) -> None:
    with pytest.raises(ValueError, match=ARGUMENT):
        sampler_class.validate_params(argued(row))


def test_a_request_that_is_shorter_than_its_prompt_is_left_alone(sampler_class) -> None:
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    sampler.update_state(BatchUpdate(1, added=((0, argued(AskedRow(replace_seed(1), 0, 50)), [1, 2], []),)))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(sampler.apply(logits.clone()), logits)


def test_a_failure_of_the_sampler_is_counted_where_an_agent_sees_it(
    sampler_class, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board = tmp_path / "board"
    monkeypatch.setenv(VARIABLE, str(board))
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    assert failures(board) == 0
    sampler.update_state(BatchUpdate(1, added=((0, argued(asked_row(replace_seed(1), 0)), None, None),)))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(sampler.apply(logits.clone()), logits), "others go on"
    assert failures(board) == 1, "nothing could be taken of an output that is not there"
    sampler.update_state(BatchUpdate(2, added=((1, SimpleNamespace(extra_args=7), None, None),)))
    assert failures(board) == 2
    assert torch.equal(sampler.apply(logits.clone()), logits), "no row is left that would decide another's tokens"
    assert failures(board) == 2


def test_a_failure_that_no_agent_would_see_ends_the_engine(sampler_class, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers go on elsewhere then. With tokens of vLLM in them they would be wrong."""
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    monkeypatch.setattr(sampler, "_apply_batch", lambda logits: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.apply(torch.randn(1, VOCABULARY))


def test_speculative_decoding_is_refused(sampler_class) -> None:
    with pytest.raises(ValueError, match="speculative"):
        sampler_class(SimpleNamespace(speculative_config=object()), torch.device("cpu"), False)


@pytest.mark.parametrize("name", [name for name in CASES if name != "greedy"])
def test_the_second_interface_decides_alike(sampler_class, name: str) -> None:
    """This interface has never run in vLLM here: its model runner needs a GPU."""
    message = submitted(CASES[name], [5, 9, 9, 31], seed=77)
    whole = our_answer(message)
    slots = Slots(sampler_class)
    assert slots.add(2, argued(asked_row(message, 0)), [*message.prompt_ids, *whole[:3]])
    assert not slots.add(1, SimpleNamespace(extra_args=None), [1, 2])
    slots.step([2, 1], {2: 3})
    while slots.length[2] < 4 + len(whole):
        slots.step([1, 2] if slots.length[2] % 2 else [2, 1], {})
    assert slots.tokens.gpu[2, 4 : 4 + len(whole)].tolist() == whole
    again = submitted(CASES[name], [8, 8], seed=3)
    assert slots.add(2, argued(asked_row(again, 0)), [8, 8]), "a slot is used again"
    slots.step([2], {})
    assert slots.tokens.gpu[2, 2].item() == our_answer(again)[0]


@pytest.mark.parametrize("name", [name for name in CASES if name != "greedy"])
def test_a_preempted_request_goes_on_by_the_second_interface(sampler_class, name: str) -> None:
    """It enters a slot again with its output, in pieces that end anywhere."""
    message = submitted(CASES[name], [7, 1, 8, 2], seed=11)
    whole = our_answer(message)
    for piece in range(5, 4 + len(whole) - 1):
        slots = Slots(sampler_class)
        assert slots.add(0, argued(asked_row(message, 0)), message.prompt_ids, whole[:-1])
        slots.step([0], {0: piece})
        slots.step([0], {})
        assert slots.tokens.gpu[0, 4 + len(whole) - 1].item() == whole[-1], piece


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_free_choices_never_reach_the_host(sampler_class, dtype: torch.dtype) -> None:
    """By the second interface, beside choices that need them; the tokens are those of our engine."""
    free = [name for name, sampling in CASES.items() if sampling.temperature and name in FREE]
    messages = [submitted(CASES[name], [5, 9, 9, 31], seed=number) for number, name in enumerate(free)]
    wholes = [our_answer(message, dtype=dtype) for message in messages]
    penalized = submitted(CASES["penalties"], [5, 9, 9, 31], seed=40)
    slots = Slots(sampler_class, len(free) + 1, dtype)
    for slot, (message, whole) in enumerate(zip(messages, wholes, strict=True)):
        assert slots.add(slot, argued(asked_row(message, 0)), [*message.prompt_ids, *whole[: slot + 1]])
    assert slots.add(len(free), argued(asked_row(penalized, 0)), penalized.prompt_ids)
    slots.step([*range(len(free) + 1)], {})
    slots.sampler._state.all_token_ids = None
    for _ in range(12):
        slots.step([*range(len(free) + 1)], {})
    for slot, whole in enumerate(wholes):
        num = min(len(whole), 14)
        assert slots.tokens.gpu[slot, 4 : 4 + num].tolist() == whole[:num], free[slot]
    num = min(13, len(our_answer(penalized, dtype=dtype)))
    assert slots.tokens.gpu[len(free), 4 : 4 + num].tolist() == our_answer(penalized, dtype=dtype)[:num]


def test_words_that_are_banned_later_are_not_left_to_vllm(sampler_class) -> None:
    message = replace_stop(submitted(SamplingParams(temperature=0.0), [5], seed=1))
    message = msgspec.structs.replace(message, bad_sequences=[[3, 4]])
    assert Slots(sampler_class).add(0, argued(asked_row(message, 0)), [5])


def test_a_plain_greedy_request_is_declined_by_the_second_interface(sampler_class) -> None:
    message = submitted(SamplingParams(temperature=0.0), [5], seed=1)
    assert not Slots(sampler_class).add(0, argued(asked_row(replace_stop(message), 0)), [5])


def replace_stop(message: SubmitGroup) -> SubmitGroup:
    return SubmitGroup(1, message.prompt_ids, message.sampling, 4, [], [[]], [False])
