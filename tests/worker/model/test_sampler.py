"""The sampler: every parameter against a plain formula, draws against their distribution, rows against their batch-mates."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampledToken, SampleRow, SequencesFailed, needs_full_logits
from ryzanstein.worker.kernels.functions.draw import Draw
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.sampling.penalties import adjust
from ryzanstein.worker.sampling.sampler import restricted
from ryzanstein.worker.sampling.sampler import sample as sample_rows
from ryzanstein.worker.sampling.truncation import floors, weights

VOCAB = 40
Sample = Callable[[torch.Tensor, Sequence[SampleRow]], list[SampledToken]]
Restrict = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


@pytest.fixture(scope="module", params=["native", "torch"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Everything holds with kernels of our own and without."""
    kernels: NativeKernels | None = request.getfixturevalue("kernels") if request.param == "native" else None
    return partial(sample_rows, kernels=kernels)


@pytest.fixture(scope="module", params=["native", "torch"])
def restrict(request: pytest.FixtureRequest) -> Restrict:
    return partial(restricted, kernels=request.getfixturevalue("kernels") if request.param == "native" else None)


def kept(logits_V: torch.Tensor, **params: Any) -> np.ndarray:
    """Which tokens top-k and top-p leave."""
    draws = [Draw.of(0, SamplingParams(**params), len(logits_V), 0.0)]
    (floor,) = floors(logits_V[None], weights(logits_V[None], draws), draws)
    return np.asarray(logits_V >= floor)


def row(index: int = 0, choice: int = 0, prompt: Sequence[int] = (), generated: Sequence[int] = (), **params: Any) -> SampleRow:
    banned = params.pop("banned", ())
    return SampleRow(SamplingParams(**{"seed": 5, **params}), choice, index, prompt, generated, banned)


def logits(num_rows: int = 1, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def draws(sample: Sample, logits_V: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    """How often each token is drawn over `count` indices of one choice."""
    tokens = sample(logits_V.expand(count, -1), [row(index, **params) for index in range(count)])
    return np.bincount([token.token_id for token in tokens], minlength=logits_V.shape[-1])


def test_temperature_0_takes_the_likeliest(sample: Sample) -> None:
    batch = logits(4)
    assert [token.token_id for token in sample(batch, [row(temperature=0)] * 4)] == batch.argmax(1).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, lambda p: p),
        ({"temperature": 0.7}, lambda p: p ** (1 / 0.7)),
        ({"top_k": 5}, lambda p: np.where(p >= np.sort(p)[-5], p, 0)),
        ({"top_p": 0.8}, lambda p: np.where(p >= _nucleus(p, 0.8), p, 0)),
        ({"min_p": 0.1}, lambda p: np.where(p >= 0.1 * p.max(), p, 0)),
        ({"top_k": 9, "top_p": 0.6}, lambda p: np.where(p >= _nucleus(np.where(p >= np.sort(p)[-9], p, 0), 0.6), p, 0)),
    ],
)
@pytest.mark.long
def test_draws_follow_the_distribution(sample: Sample, params: dict[str, Any], expected: Any) -> None:
    logits_V = logits()[0]
    probabilities = expected(logits_V.double().softmax(0).numpy())
    probabilities = probabilities / probabilities.sum()
    counts = draws(sample, logits_V, 20_000, **params)
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities * 20_000 >= 5
    rest = counts[~likely].sum(), probabilities[~likely].sum() * 20_000
    chi_square = ((counts[likely] - probabilities[likely] * 20_000) ** 2 / (probabilities[likely] * 20_000)).sum()
    chi_square += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 0 else 0
    degrees = likely.sum()
    assert chi_square < degrees + 3.3 * math.sqrt(2 * degrees) + 4  # beyond p = 0.001


def _nucleus(probabilities: np.ndarray, top_p: float) -> float:
    """The least probability in the smallest set of likeliest tokens that holds `top_p` of the mass."""
    descending = np.sort(probabilities / probabilities.sum())[::-1]
    return float(np.sort(probabilities)[::-1][np.searchsorted(np.cumsum(descending), top_p)])


def test_a_draw_depends_on_seed_choice_and_index_alone(sample: Sample) -> None:
    logits_V = logits()[0]
    alone = [sample(logits_V[None], [row(index, choice)])[0].token_id for choice in (0, 1) for index in range(50)]
    again = [t.token_id for t in sample(logits_V.expand(100, -1), [row(i, c) for c in (0, 1) for i in range(50)])]
    assert alone == again
    assert alone[:50] != alone[50:]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 1000]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.5]),
        "logit_bias": st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
        "logprobs": st.sampled_from([None, 0, 4]),
        "seed": st.integers(0, 2**64 - 1),
        "banned": st.sampled_from([(), (0, 1)]),
        "prompt": st.lists(st.integers(0, VOCAB - 1), max_size=6),
        "generated": st.lists(st.integers(0, VOCAB - 1), max_size=6),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 1000))
def test_batch_mates_change_nothing(sample: Sample, batch: list[dict[str, Any]], seed: int) -> None:
    logits_SV = logits(len(batch), seed)
    rows = [row(index, **params) for index, params in enumerate(batch)]
    together = sample(logits_SV, rows)
    assert together == [sample(logits_SV[s : s + 1], [rows[s]])[0] for s in range(len(rows))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(0, 1000))
def test_only_tokens_whose_bits_are_set_are_left(restrict: Restrict, num_rows: int, vocab_size: int, seed: int) -> None:
    random, logits_SV = np.random.default_rng(seed), torch.randn(num_rows, vocab_size)
    words_SW = random.integers(0, 2**32, (num_rows, (vocab_size + 31) // 32), np.uint32)
    found_SV = restrict(logits_SV.clone(), words_SW)
    for s in range(num_rows):
        for token in range(vocab_size):
            is_set = int(words_SW[s, token // 32]) >> token % 32 & 1
            assert found_SV[s, token] == (logits_SV[s, token] if is_set else -math.inf)


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.integers(0, 1000))
def test_penalties_are_the_plain_formulas(params: dict[str, Any], seed: int) -> None:
    logits_SV = logits(1, seed)
    penalized = adjust(logits_SV.clone(), [row(**params)])[0]
    for token in range(VOCAB):
        assert penalized[token].item() == pytest.approx(
            _penalized(logits_SV[0, token].item(), token, params), rel=1e-5, abs=1e-5
        )


def _penalized(logit: float, token: int, params: dict[str, Any]) -> float:
    if token in params["prompt"] or token in params["generated"]:
        penalty = params["repetition_penalty"]
        logit = logit * penalty if logit < 0 else logit / penalty
    count = params["generated"].count(token)
    logit -= params["frequency_penalty"] * count + params["presence_penalty"] * (count > 0)
    logit += sum(bias for biased, bias in params["logit_bias"] if biased == token)
    return -math.inf if token in params["banned"] else logit


def test_token_ids_outside_the_vocabulary_are_passed_over() -> None:
    strange = [VOCAB, 10**9, -1]
    strange_row = row(
        prompt=strange,
        generated=strange,
        repetition_penalty=1.3,
        presence_penalty=1,
        logit_bias=((VOCAB, 100.0), (-1, 100.0)),
        banned=strange,
    )
    assert torch.equal(adjust(logits(), [strange_row]), logits())


def test_banned_tokens_are_never_drawn(sample: Sample) -> None:
    logits_V = logits()[0]
    best = int(logits_V.argmax())
    assert draws(sample, logits_V, 2000, banned=(best,))[best] == 0
    assert sample(logits_V[None], [row(temperature=0, banned=(best,))])[0].token_id == int(logits_V.topk(2).indices[1])


def test_logprobs_are_the_models_own_before_temperature_and_penalties(sample: Sample) -> None:
    logits_SV = logits(2)
    expected = logits_SV[0].log_softmax(0)
    best = int(expected.argmax())
    token, plain = sample(
        logits_SV, [row(temperature=0, logit_bias=((best, -100.0),), logprobs=3), row(temperature=0.5, generated=[1])]
    )
    assert token.token_id != best
    assert token.logprob == pytest.approx(expected[token.token_id].item())
    assert [token_id for token_id, _ in token.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in token.top] == pytest.approx(expected.topk(3).values.tolist())
    assert plain == SampledToken(plain.token_id)


def test_logprobs_0_gives_only_the_tokens_own(sample: Sample) -> None:
    (token,) = sample(logits(), [row(temperature=0, logprobs=0)])
    assert token.logprob is not None
    assert token.top == ()


def test_a_tiny_temperature_is_greedy_and_finite(sample: Sample) -> None:
    batch = logits(8, scale=30.0)
    tokens = sample(batch, [row(index, temperature=1e-6) for index in range(8)])
    assert [token.token_id for token in tokens] == batch.argmax(1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named_and_others_are_not(sample: Sample, bad: float) -> None:
    logits_SV = logits(4)
    logits_SV[1, 7] = bad
    logits_SV[3] = -math.inf
    with pytest.raises(SequencesFailed) as caught:
        sample(logits_SV, [row()] * 4)
    assert set(caught.value.rows) == {1, 3}


def test_a_random_row_without_a_seed_is_refused(sample: Sample) -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        sample(logits(), [row(seed=None)])


def test_equals_of_the_last_token_kept_are_kept() -> None:
    assert kept(torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0]), top_k=2).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("top_k", [0, 700, 2000])
def test_a_flat_distribution_is_cut_as_exactly_as_a_steep_one(top_p: float, top_k: int) -> None:
    """The nucleus of a flat distribution is wider than what is looked at first."""
    logits_V = logits(vocab=3000, scale=0.1)[0]
    probabilities = logits_V.double().softmax(0).numpy()
    if top_k:
        probabilities = np.where(probabilities >= np.sort(probabilities)[-top_k], probabilities, 0)
    num_kept = kept(logits_V, top_p=top_p, top_k=top_k).sum()
    assert num_kept == (probabilities >= _nucleus(probabilities, top_p)).sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logprobs": 0},
        {"logit_bias": ((1, 1.0),)},
        {"banned": (2,)},
    ],
)
def test_anything_but_plain_greedy_needs_full_logits(params: dict[str, Any]) -> None:
    assert not needs_full_logits(row(temperature=0))
    assert needs_full_logits(row(**{"temperature": 0, **params}))


@pytest.mark.parametrize("vocab", [251, 50_257])
def test_a_row_has_one_answer_beside_any_others(sample: Sample, vocab: int) -> None:
    """Tokens and log probabilities, bit for bit."""
    scores = logits(5, vocab=vocab, scale=3.0)
    rows = [
        row(0, logprobs=2),
        row(1, logprobs=2, temperature=0.7, top_k=50),
        row(2, logprobs=2, top_p=0.9, repetition_penalty=1.1, generated=(4, 4)),
        row(3, logprobs=2, temperature=1.4, top_p=0.95, min_p=0.01),
        row(4, logprobs=2, temperature=0),
    ]
    together = sample(scores, rows)
    for s in range(5):
        assert sample(scores[s : s + 1].clone(), rows[s : s + 1]) == together[s : s + 1]
