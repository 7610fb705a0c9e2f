"""What adapters add to a product, against double precision: pieces, ranks, rows of several adapters, lookups, any registers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.adapted import AdaptableWeight, AdapterRows, AdapterSite, LowRankFactors, Piece

CPU = torch.device("cpu")
PIECES: tuple[Piece, ...] = ((0, 5, 70, 0), (1, 0, 33, 70), (0, 200, 11, 103), (1, 40, 1, 114))
"""Of weights with 211 and 41 outputs."""
NUM_INPUTS, OWN = 90, (13, 67)
RANKS = {1: 1, 2: 8, 4: 16, 5: 17, 9: 200}
HALVES, SCALES = (2, 9), {9: 0.25, 4: 4.0}
"""Slots whose factors are in float16, and those whose x A is multiplied by something."""
SLOT_T = np.array([0, 2, 2, 9, 1, 0, 5, 4, 2, *[5] * 40, 4, 7, 1], np.int64)
"""Slot 7 has an adapter of other weights."""


def with_room(numbers: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers with 64 bytes behind them that are read and do not count."""
    memory = torch.full((numbers.numel() + 32,), torch.nan, dtype=dtype)
    memory[: numbers.numel()] = numbers.flatten()
    return memory[: numbers.numel()].view(numbers.shape)


@dataclass(frozen=True)
class Problem:
    """Factors of each slot and weight, rows, and a result to add to. Slot 4 adapts one weight, slot 5 has biases."""

    factors: dict[int, dict[str, LowRankFactors]]
    x_TI: Tensor
    out_TO: Tensor

    @classmethod
    def of(cls, normal: Callable[..., Tensor]) -> "Problem":
        factors = {}
        for slot, rank in RANKS.items():
            factors[slot] = {
                name: LowRankFactors(
                    with_room(normal(slot, NUM_INPUTS, rank), torch.float16 if slot in HALVES else torch.float32),
                    with_room(normal(slot + 20, rank, width), torch.float16 if slot in HALVES else torch.float32),
                    with_room(normal(slot + 40, width)) if slot == 5 else None,
                    SCALES.get(slot, 1.0),
                )
                for name, width in (("one", 211), ("two", 41))[: 1 if slot == 4 else 2]
            }
        return cls(factors, normal(1, len(SLOT_T), OWN[1]), normal(2, len(SLOT_T), 130))

    def site(self, native: NativeKernels | None, own: tuple[int, int] = OWN) -> AdapterSite:
        weights = [AdaptableWeight("one", NUM_INPUTS, 211, own), AdaptableWeight("two", NUM_INPUTS, 41, own)]
        site = AdapterSite(weights, PIECES, native)
        for slot, found in self.factors.items():
            site.map(slot, found.get)
        return site

    def added(self, site: AdapterSite, index: Sequence[int]) -> Tensor:
        """What the site makes of some rows, at a stride of their own."""
        rows = AdapterRows.of(SLOT_T[list(index)], CPU)
        wide_TO = self.out_TO[list(index)].clone()
        if rows is not None:
            site.add(self.x_TI[list(index)], wide_TO[:, :115], rows)
        return wide_TO

    def expected(self) -> Tensor:
        out_TO = self.out_TO.double()
        for t, slot in enumerate(SLOT_T.tolist()):
            for number, start, count, to in PIECES:
                each = self.factors.get(slot, {}).get(("one", "two")[number])
                if each is not None:
                    low_R = self.x_TI[t].double() @ each.a_IR.double().narrow(0, *OWN) * each.scale
                    sums_O = low_R @ each.b_RO.double() + (0 if each.bias_O is None else each.bias_O.double())
                    out_TO[t, to : to + count] += sums_O[start : start + count]
        return out_TO


@pytest.fixture
def problem(normal: Callable[..., Tensor]) -> Problem:
    return Problem.of(normal)


@pytest.mark.parametrize("own", [True, False], ids=["own kernel", "torch"])
def test_it_adds_the_product_of_both_factors(problem: Problem, kernels: NativeKernels, own: bool) -> None:
    found = problem.added(problem.site(kernels if own else None), range(len(SLOT_T)))
    expected = problem.expected()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-3)
    untouched = SLOT_T == 0
    assert torch.equal(found[untouched], problem.out_TO[untouched])
    assert torch.equal(found[:, 115:], problem.out_TO[:, 115:])


def test_a_row_is_the_same_in_any_company(
    problem: Problem, kernels: NativeKernels, threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    site = problem.site(kernels)
    alone = torch.cat([problem.added(site, [t]) for t in range(len(SLOT_T))])
    order = torch.randperm(len(SLOT_T), generator=torch.Generator().manual_seed(1)).tolist()
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(problem.added(site, range(len(SLOT_T))), alone)
            assert torch.equal(problem.added(site, order), alone[order])
            assert torch.equal(problem.added(site, order[:9]), alone[order[:9]])


@pytest.mark.parametrize("num_inputs", [5001, 5002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_single_row_is_the_same_on_any_threads(
    num_inputs: int,
    dtype: torch.dtype,
    normal: Callable[..., Tensor],
    kernels: NativeKernels,
    threads: Callable[[int], AbstractContextManager[None]],
) -> None:
    """Threads share the inputs of a single row."""
    shapes = ((num_inputs, 20), (20, 40))
    factors = {
        name: LowRankFactors(*(with_room(normal(seed, *shape), dtype) for shape in shapes))
        for seed, name in enumerate(("one", "two"))
    }
    site = AdapterSite(
        [AdaptableWeight(name, num_inputs, 40, (0, num_inputs)) for name in factors], [(0, 0, 40, 0), (1, 0, 40, 40)], kernels
    )
    site.map(1, factors.get)
    x_TI, before, rows = normal(7, 2, num_inputs), normal(8, 2, 80), AdapterRows.of(np.array([0, 1]), CPU)
    assert rows is not None
    found = []
    for count in (1, 2, 3, 4):
        with threads(count):
            found.append(before.clone())
            site.add(x_TI, found[-1], rows)
    sums = [x_TI[1].double() @ each.a_IR.double() @ each.b_RO.double() for each in factors.values()]
    assert torch.allclose(found[0][1].double(), before[1].double() + torch.cat(sums), rtol=1e-4, atol=1e-2)
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_lookup_adds_the_row_of_an_id(problem: Problem, kernels: NativeKernels) -> None:
    """It is the product with a row that has a single 1; ids below 0 belong to another rank."""
    ids_T = torch.arange(len(SLOT_T)) * 7 % OWN[1]
    ids_T[[2, 6, 20]] = -1
    rows = AdapterRows.of(SLOT_T, CPU)
    assert rows is not None
    one_hot = torch.nn.functional.one_hot(ids_T.clamp(min=0), OWN[1]).float()
    for native in (kernels, None):
        site, found, expected = problem.site(native), problem.out_TO.clone(), problem.out_TO.clone()
        site.add_rows(ids_T, found[:, :115], rows)
        site.add(one_hot, expected[:, :115], rows)
        expected[ids_T < 0] = problem.out_TO[ids_T < 0]
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_slots_are_dropped_and_taken_again(problem: Problem, kernels: NativeKernels) -> None:
    site, whole = problem.site(kernels), range(len(SLOT_T))
    before = problem.added(site, whole)
    site.drop(9)
    site.drop(9)
    after = problem.added(site, whole)
    mine = torch.from_numpy(SLOT_T == 9)
    assert torch.equal(after[~mine], before[~mine])
    assert torch.equal(after[mine], problem.out_TO[mine])
    site.map(9, problem.factors[9].get)
    assert torch.equal(problem.added(site, whole), before)


@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx"])
@pytest.mark.long
def test_narrower_registers_compute_the_same(
    problem: Problem, kernels: NativeKernels, compiled_with: Callable[[str], NativeKernels], option: str
) -> None:
    """To the bit where additions are fused, because lanes are ranks and outputs."""
    wide, narrow = (problem.added(problem.site(native), range(len(SLOT_T))) for native in (kernels, compiled_with(option)))
    assert torch.allclose(narrow, wide, rtol=1e-5, atol=1e-3)
    assert option == "-mno-avx" or torch.equal(narrow, wide)
