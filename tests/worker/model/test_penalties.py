"""Penalties from counts that are kept, against counting everything anew at each token: the same to the last bit."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.sampling.penalties import adjust

VOCAB = 50
penalties = st.builds(
    SamplingParams,
    seed=st.just(1),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.37, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.13, -0.9]),
)
tokens = st.lists(st.integers(-2, VOCAB + 2), max_size=30)


def rescanned(logits_SV: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Token by token, each row from all of its tokens."""
    logits_SV = logits_SV.clone()
    for logits_V, row in zip(logits_SV, rows, strict=True):
        params = row.sampling
        for token in {*row.prompt_ids, *row.generated_ids}:
            if 0 <= token < len(logits_V):
                penalty = torch.tensor(params.repetition_penalty)
                logits_V[token] = logits_V[token] * penalty if logits_V[token] < 0 else logits_V[token] / penalty
        for token, count in Counter(row.generated_ids).items():
            if 0 <= token < len(logits_V):
                presence, frequency = torch.tensor(params.presence_penalty), torch.tensor(params.frequency_penalty)
                logits_V[token] -= presence + frequency * torch.tensor(float(count))
    return logits_SV


@given(params=st.lists(penalties, min_size=1, max_size=4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_kept_counts_penalize_as_a_rescan_does(params, data) -> None:
    rows = [SampleRow(each, 0, 0, data.draw(tokens), data.draw(tokens)) for each in params]
    for step in range(6):
        logits_SV = torch.randn((len(rows), VOCAB), generator=torch.Generator().manual_seed(step))
        assert torch.equal(adjust(logits_SV.clone(), rows), rescanned(logits_SV, rows))
        for row in rows:
            if data.draw(st.booleans()):  # a row may miss a step, or be tried again without a token
                row.generated_ids.append(data.draw(st.integers(-2, VOCAB + 2)))


def test_a_sequence_that_is_resumed_counts_what_it_had() -> None:
    """On another node the same tokens come at once instead of one by one."""
    sampling = SamplingParams(seed=1, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
    message = [random.Random(3).randrange(VOCAB) for _ in range(500)]
    undisturbed = SampleRow(sampling, 0, 0, [1, 2, 3], [])
    logits_SV = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(0))
    for token in message:
        adjust(logits_SV.clone(), [undisturbed])
        undisturbed.generated_ids.append(token)
    resumed = SampleRow(sampling, 0, len(message), [1, 2, 3], list(message))
    assert torch.equal(adjust(logits_SV.clone(), [undisturbed]), adjust(logits_SV.clone(), [resumed]))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_token_costs_the_same_after_many_others(name: str) -> None:
    """At 32,768 tokens a rescan took 30 times as long as the rest of the row; the bound is for a busy machine."""
    row = SampleRow(SamplingParams(seed=1, **{name: 1.1}), 0, 0, [], [i * 3 % 128_000 for i in range(32_768)])
    logits_SV = torch.zeros((1, 128_000))
    adjust(logits_SV.clone(), [row])
    taken = []
    for token in range(20):
        row.generated_ids.append(token)
        began = time.perf_counter()
        adjust(logits_SV.clone(), [row])
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.004, taken
