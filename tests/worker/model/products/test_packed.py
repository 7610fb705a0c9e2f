"""Our own float32 products against float64, row by row, thread by thread, with numbers that are none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.floats import Packed, float_product

Make = Callable[[Tensor, Tensor | None], Product]
SHAPES = [(48, 64), (7, 5), (1, 288), (250, 96), (33, 1030), (864, 288), (290, 2050)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 32, 100)


@pytest.fixture
def packed(kernels: NativeKernels) -> Make:
    return lambda weight_OI, bias_O: Packed(weight_OI, bias_O, kernels, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_float32(packed: Make, normal: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    """Wrong by n eps times the sum of sizes at most, as float32 sums are in any order (Higham 2002, 3.1)."""
    weight_OI, bias_O = normal(1, *shape), normal(2, shape[0])
    for rows in ROWS:
        x_TI = normal(rows, rows, shape[1])
        sizes_TO = x_TI.abs().double() @ weight_OI.abs().double().t() + bias_O.abs().double()
        exact_TO = x_TI.double() @ weight_OI.double().t()
        for bias, expected_TO in ((None, exact_TO), (bias_O, exact_TO + bias_O.double())):
            error_TO = (packed(weight_OI, bias)(x_TI).double() - expected_TO).abs()
            assert (error_TO <= shape[1] * torch.finfo(torch.float32).eps * sizes_TO + 1e-30).all()


@pytest.mark.parametrize("shape", [(250, 96), (290, 2050)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(packed: Make, normal: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    row_1I, product = normal(3, 1, shape[1]), packed(normal(4, *shape), normal(5, shape[0]))
    alone_O = product(row_1I)[0]
    for rows in ROWS:
        for place in {0, rows // 2, rows - 1}:
            x_TI = normal(rows, rows, shape[1])
            x_TI[rows // 4] = torch.nan
            x_TI[place] = row_1I[0]
            assert torch.equal(product(x_TI)[place], alone_O)


def test_the_number_of_threads_changes_no_bit(
    packed: Make, normal: Callable[..., Tensor], threads: Callable[[int], object]
) -> None:
    weight_OI, inputs = normal(6, 1100, 520), [normal(rows, rows, 520) for rows in ROWS]
    answers = []
    for count in (1, 2, 3):
        with threads(count):
            product = packed(weight_OI, None)
            answers.append([product(x_TI) for x_TI in inputs])
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_number_makes_its_row_and_no_other_not_finite(
    packed: Make, normal: Callable[..., Tensor], broken: float
) -> None:
    x_TI = normal(7, 8, 70)
    x_TI[2, 37] = broken
    finite_TO = packed(normal(8, 30, 70), None)(x_TI).isfinite()
    assert not finite_TO[2].any()
    assert finite_TO[[0, 1, 3, 4, 5, 6, 7]].all()


def test_rows_may_lie_apart(packed: Make, normal: Callable[..., Tensor]) -> None:
    wide_TI = normal(9, 6, 200)
    product = packed(normal(10, 30, 64), None)
    assert torch.equal(product(wide_TI[:, 8:72]), product(wide_TI[:, 8:72].contiguous()))


def test_no_rows_give_no_rows(packed: Make, normal: Callable[..., Tensor]) -> None:
    assert packed(normal(11, 30, 64), None)(torch.empty(0, 64)).shape == (0, 30)


def test_our_own_kernel_is_taken_but_for_a_large_weight_that_another_reads(kernels: NativeKernels) -> None:
    large_OI, small_OI = torch.ones(4096, 1024), torch.ones(16, 1024)
    for weight_OI, kept in ((large_OI, False), (small_OI, False), (small_OI, True)):
        assert isinstance(float_product(weight_OI, None, kernels, kept=kept), Packed)
    assert not isinstance(float_product(large_OI, None, kernels, kept=True), Packed)
