"""Random draws: kernels of our own and torch take the same token of any row, which is that of the plain formula in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampleRow, SequencesFailed
from ryzanstein.worker.kernels.functions.draw import Draw
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.sampling.drawing import draw
from ryzanstein.worker.sampling.sampler import new_likeliest, sample
from ryzanstein.worker.sampling.truncation import drawn, weights

LAST = 1 - 2**-53  # the greatest uniform number
UNIFORM = st.one_of(st.sampled_from([0.0, 0.5, LAST]), st.floats(0, LAST))
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from([5e-324, 1e-6, 1e-3, 1e308]), st.floats(0.05, 2)),
        "top_k": st.one_of(st.sampled_from([0, 1, 2, 2**32 - 1]), st.integers(1, 5000)),
        "top_p": st.one_of(st.sampled_from([5e-324, 0.5, 0.95, 1 - 1e-9, LAST, 1.0]), st.floats(0.01, 1)),
        "min_p": st.sampled_from([0.0, 0.0, 1e-20, 0.05, 0.5, 1.0]),
    }
)
SHAPES = st.sampled_from([1, 2, 7, 40, 251, 512, 513, 2049, 5000])
SPREADS = ["normal", "steep", "flat", "equal", "rounded", "huge", "outlier", "masked", "lowest"]


def logits(kind: str, seed: int, vocab: int, rows: int = 1) -> torch.Tensor:
    """Rows of some kind; token `seed % vocab` has a finite logit in each."""
    x_SV = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    x_SV *= {"steep": 30, "flat": 1e-4, "equal": 0, "huge": 1e37, "outlier": 1e-4}.get(kind, 1)
    banned_SV = torch.rand((rows, vocab), generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    if kind == "rounded":
        x_SV = x_SV.round()
    if kind == "masked":
        x_SV[banned_SV] = -torch.inf
    if kind == "lowest":
        x_SV[banned_SV] = torch.finfo(torch.float32).min
    x_SV[:, seed % vocab] = -8.0 if kind == "outlier" else 0.25
    return x_SV


def draw_of(row: int, vocab: int, uniform: float, **params: Any) -> Draw:
    return Draw.of(row, SamplingParams(**params), vocab, uniform)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SPREADS),
    st.integers(0, 10**6),
    SHAPES,
    st.lists(st.tuples(PARAMS, UNIFORM), min_size=1, max_size=4),
)
def test_kernels_and_torch_draw_the_same(
    kernels: NativeKernels, kind: str, seed: int, vocab: int, rows: list[tuple[dict[str, Any], float]]
) -> None:
    x_RV = logits(kind, seed, vocab, len(rows))
    draws = [draw_of(r, vocab, uniform, **params) for r, (params, uniform) in enumerate(rows)]
    assert kernels.sampling.draw(x_RV, draws).tolist() == drawn(x_RV, draws).tolist()


@pytest.mark.parametrize(
    ("vocab", "kind"), [*((32_000, kind) for kind in SPREADS), *((262_144, kind) for kind in ("normal", "rounded"))]
)
def test_kernels_and_torch_draw_the_same_of_large_vocabularies(kernels: NativeKernels, vocab: int, kind: str) -> None:
    cuts: Sequence[dict[str, Any]] = (
        *({}, {"top_p": 0.95}, {"top_p": 1 - 1e-9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.02}),
        *({"top_k": vocab // 2, "top_p": 0.5}, {"top_k": vocab - 1}, {"top_p": 0.3, "temperature": 0.1}),
    )
    x_RV = logits(kind, 5, vocab, len(cuts))
    draws = [draw_of(r, vocab, 0.37, **params) for r, params in enumerate(cuts)]
    assert kernels.sampling.draw(x_RV, draws).tolist() == drawn(x_RV, draws).tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["normal", "flat", "steep", "rounded", "masked"]), st.integers(0, 10**6), SHAPES, st.tuples(PARAMS, UNIFORM)
)
@example("steep", 0, 40, ({"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, 0.0))  # the first tokens weigh nothing
def test_a_draw_is_that_of_the_plain_formula(
    kernels: NativeKernels, kind: str, seed: int, vocab: int, drawing: tuple[dict[str, Any], float]
) -> None:
    """But within 1e-9 of where one token's part of the distribution ends and the next one's begins, and of a bound."""
    (params, uniform), x_V = drawing, logits(kind, seed, vocab)[0]
    (token,) = kernels.sampling.draw(x_V[None], [draw_of(0, vocab, uniform, **params)]).tolist()
    bounds = [{**params, "top_p": top_p} for top_p in (params["top_p"], *_around(params["top_p"]))]
    assert any(token in plainly_drawn(x_V, bound, *_around(uniform)) for bound in bounds)


def _around(value: float) -> tuple[float, float]:
    return max(value - 1e-9, 0.0), min(value + 1e-9, 1.0)


def plainly_drawn(x_V: torch.Tensor, params: dict[str, Any], low: float, high: float) -> list[int]:
    """The tokens of uniform numbers from `low` to `high`: sorted probabilities in float64, cut one after the other."""
    scores = (x_V.double().numpy() - float(x_V.max())) / max(params["temperature"], 1e-300)
    mass = np.exp(np.maximum(scores, -1e4))
    best = np.sort(x_V.numpy())[::-1]
    if 0 < params["top_k"] < len(mass):
        mass = np.where(x_V.numpy() >= best[params["top_k"] - 1], mass, 0)
    if params["top_p"] < 1:
        order = np.argsort(-x_V.numpy(), kind="stable")
        reached = np.cumsum(mass[order]) / mass.sum()
        last = order[min(int(np.searchsorted(reached, params["top_p"])), len(order) - 1)]
        mass = np.where(x_V.numpy() >= x_V.numpy()[last], mass, 0)
    mass = np.where(mass >= params["min_p"], mass, 0)
    sums = np.cumsum(mass)
    first, last = (int(np.searchsorted(sums, uniform * sums[-1], side="right")) for uniform in (low, high))
    tokens = np.flatnonzero(mass)
    return [int(token) for token in tokens if min(first, tokens[-1]) <= token <= last]


@pytest.mark.parametrize("options", ["-mno-avx512f", pytest.param("-mno-avx2", marks=pytest.mark.lab), "-mno-avx"])
def test_every_weight_is_the_same_bit_by_bit_on_every_cpu(compiled_with: Callable[[str], NativeKernels], options: str) -> None:
    """A token is drawn from exactly the sum of the weights before it on: the kernel's weights are those of torch."""
    x_V, kernels = logits("normal", 3, 41)[0], compiled_with(options)
    for temperature in (0.3, 0.7, 1.0, 1.9):
        start = weights(x_V[None], [draw_of(0, 41, 0.0, temperature=temperature)])[0].cumsum(0)
        for before, token in zip(start[:-1].tolist(), range(1, 41), strict=True):
            if before < start[token].item():
                uniforms = [uniform_at(sums, int(start[-1])) for sums in (before - 1, before)]
                draws = [draw_of(0, 41, uniform, temperature=temperature) for uniform in uniforms]
                below, above = kernels.sampling.draw(x_V[None], draws).tolist()
                assert below < token == above


def uniform_at(sums: int, total: int) -> float:
    """The uniform number whose part of the total is `sums` and less than one more."""
    uniform = sums / total
    while int(uniform * float(total)) < sums:
        uniform = math.nextafter(uniform, 1)
    while int(uniform * float(total)) > sums:
        uniform = math.nextafter(uniform, 0)
    return uniform


def test_weights_are_rounded_powers_of_two() -> None:
    x_V = logits("normal", 9, 5000)[0]
    draws = [draw_of(0, 5000, 0.0, temperature=0.8)]
    (weight_V,) = weights(x_V[None], draws)
    exact_V = np.exp((x_V.double().numpy() - float(x_V.max())) / 0.8) * 2.0 ** draws[0].bits
    assert weight_V.max().item() == 2 ** draws[0].bits
    np.testing.assert_allclose(weight_V.double().numpy(), exact_V, rtol=5e-14, atol=0.51)


@pytest.mark.parametrize("vocab", [1, 7, 32_000, 131_072, 262_208, 1_000_000, 2**21 + 1])
def test_the_sum_of_all_weights_fits(vocab: int) -> None:
    assert vocab * 2 ** draw_of(0, vocab, 0.0).bits < 2**63


def test_equals_of_the_greatest_are_drawn_evenly_and_a_single_one_always(kernels: NativeKernels) -> None:
    x_RV = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [1.0, 3.0, 2.0, 0.0]])
    draws = [draw_of(row, 4, u, top_k=1) for row in (0, 1) for u in (0.0, 0.49, 0.5, LAST)]
    assert kernels.sampling.draw(x_RV, draws).tolist() == [1, 1, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("stride", [20_000, 20_003])
def test_threads_neighbours_and_strides_change_nothing(
    kernels: NativeKernels, threads: Callable[[int], Any], stride: int
) -> None:
    wide_RV = logits("normal", 4, stride, 6)
    x_RV = wide_RV[:, :20_000]
    draws = [draw_of(r, 20_000, 0.1 + r / 10, top_p=0.9, top_k=(0, 40)[r % 2]) for r in range(6)]
    alone = [kernels.sampling.draw(x_RV[draw.row][None].clone(), [replace(draw, row=0)]) for draw in draws]
    for count in (1, 2, 3):
        with threads(count):
            assert kernels.sampling.draw(x_RV, draws).tolist() == torch.cat(alone).tolist()
            assert kernels.sampling.draw(x_RV, draws[::-2]).tolist() == torch.cat(alone[::-2]).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 17, 699])
def test_the_greatest_logit_is_the_first_of_its_equals_and_not_a_number_spreads(
    kernels: NativeKernels, bad: float, at: int
) -> None:
    x_SV = logits("rounded", 6, 700, 3)
    x_SV[1, at] = bad
    assert new_likeliest(kernels)(x_SV.T.contiguous().T)[1].tolist() == kernels.sampling.greatest(x_SV)[1].tolist()
    best_S, token_S = kernels.sampling.greatest(x_SV)
    torch.testing.assert_close(best_S, x_SV.amax(dim=1), rtol=0, atol=0, equal_nan=True)
    assert token_S[[0, 2]].tolist() == [int((x_SV[s] == best_S[s]).nonzero()[0]) for s in (0, 2)]
    assert kernels.sampling.draw(x_SV, [draw_of(1, 700, 0.5)]).tolist() == [-1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_to_draw_fails_alone(kernels: NativeKernels, temperature: float, native: bool) -> None:
    rows = [SampleRow(SamplingParams(seed=1, temperature=temperature), 0, 0, (), (), banned) for banned in ((), range(9))]
    with pytest.raises(SequencesFailed) as caught:
        sample(logits("normal", 0, 9, 2), rows, kernels if native else None)
    assert set(caught.value.rows) == {1}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPREADS), st.integers(0, 10**6), SHAPES, st.lists(PARAMS, min_size=1, max_size=4))
def test_what_stays_on_the_device_is_the_sampled_token(kind: str, seed: int, vocab: int, params: list[dict[str, Any]]) -> None:
    """Every other row is drawn; one of them has no finite logits."""
    x_SV = logits(kind, seed, vocab, 2 * len(params) + 1)
    x_SV[-1] = torch.nan
    rows = {2 * s: SampleRow(SamplingParams(seed=seed, **each), s, s, (), ()) for s, each in enumerate([*params, {}])}
    left_SV = x_SV.clone()
    draw(left_SV, rows)
    for s, row in rows.items():
        if s < 2 * len(params):
            (token,) = sample(x_SV[s : s + 1], [row])
            assert left_SV[s].isfinite().nonzero().tolist() == [[token.token_id]]
    assert left_SV[-1].isnan().all()
    assert torch.equal(left_SV[1::2], x_SV[1::2])


@pytest.mark.parametrize("params", [{}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}, {"top_k": 1000}, {"top_p": 0.9}])
def test_a_draw_on_a_gpu_waits_for_nothing(params: dict[str, Any]) -> None:
    """On the meta device, where reading a value raises. Never run on hardware."""
    rows = {s: SampleRow(SamplingParams(seed=1, **params), 0, s, (), ()) for s in range(4)}
    logits_SV = torch.empty(6, 151_936, dtype=torch.bfloat16, device="meta")
    draw(logits_SV, rows)
    with pytest.raises(NotImplementedError):
        sample(logits_SV[:4].float(), [*rows.values()])
