"""8-bit products against float64, kernel against kernel, row by row, with numbers that are none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.fastest import exact_kernels
from ryzanstein.worker.products.int8 import (
    FloatsKernel,
    Int8Product,
    Int8Table,
    KernelType,
    NativeKernel,
    block_of,
    quantize_weight,
    transform_rows,
)

SHAPES = [(48, 64), (7, 5), (1, 288), (250, 96), (864, 288), (1100, 520)]
ROWS = (1, 2, 3, 5, 8, 17, 32, 100)


def by_all(
    kernel_types: list[KernelType], native: NativeKernels | None, weight_OI: Tensor, bias_O: Tensor | None = None
) -> list[Int8Product]:
    return [Int8Product.of(weight_OI, bias_O, kind, native) for kind in kernel_types]


def bound(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """What rounding both to steps of their row's largest / 127 can change at most, and float32 besides: [T, O].

    With |dx| <= sx / 2 and |dw| <= sw / 2 it is |dx| |w| + |x| |dw| + |dx| |dw|, summed over inputs.
    """
    x_TI, weight_OI = x_TI.double(), weight_OI.double()
    dx_T1 = x_TI.abs().amax(1, keepdim=True) / 254
    dw_O = weight_OI.abs().amax(1) / 254
    sum_O, sum_T1 = weight_OI.abs().sum(1), x_TI.abs().sum(1, keepdim=True)
    worst_TO = dx_T1 * sum_O + sum_T1 * dw_O + x_TI.shape[1] * dx_T1 * dw_O
    return worst_TO * 1.0001 + 1e-30


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_stays_within_what_rounding_can_do(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    weight_OI, x_TI = normal(1, *shape), normal(2, 33, shape[1])
    exact_TO = x_TI.double() @ weight_OI.double().t()
    for product in by_all(kernel_types, native, weight_OI):
        error_TO = (product(x_TI).double() - exact_TO).abs()
        assert (error_TO <= bound(x_TI, weight_OI)).all()
        assert error_TO.norm() < 0.02 * exact_TO.norm()


def test_whole_numbers_are_multiplied_exactly(kernel_types: list[KernelType], native: NativeKernels | None) -> None:
    """Rows and outputs whose largest number is 127 have a scale of 1: nothing is rounded, sums of 520 stay below 2^24."""
    generator = torch.Generator().manual_seed(3)
    weight_OI = torch.randint(-127, 128, (40, 520), generator=generator).float()
    x_TI = torch.randint(-127, 128, (9, 520), generator=generator).float()
    weight_OI[:, 0], x_TI[:, 1] = 127, -127
    for product in by_all(kernel_types, native, weight_OI):
        assert torch.equal(product(x_TI), (x_TI.double() @ weight_OI.double().t()).float())


@pytest.mark.parametrize(("width", "block"), [(640, 128), (4096, 128), (288, 32), (80, 16), (72, 1), (7, 1), (1, 1)], ids=str)
def test_blocks_are_the_largest_power_of_two_that_divides_the_width(width: int, block: int) -> None:
    assert block_of(width) == block


@pytest.mark.parametrize("width", [16, 32, 64, 128, 288, 640])
def test_the_transform_is_a_product_with_a_hadamard_matrix(kernels: NativeKernels, width: int) -> None:
    """Sylvester's: row i and column j have (-1)^(number of ones in i & j). Our own gives the bits of torch's."""
    block = block_of(width)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    x_TI = torch.randint(-1000, 1000, (5, width), generator=torch.Generator().manual_seed(width)).float()
    expected_TI = (x_TI.view(5, -1, block) @ signs).view(5, width)
    assert torch.equal(transform_rows(x_TI, block), expected_TI)
    assert torch.equal(kernels.int8.transform_rows(x_TI, block), expected_TI)
    noise_TI = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 3).unsqueeze(1)
    assert torch.equal(kernels.int8.transform_rows(noise_TI, block), transform_rows(noise_TI, block))


def test_a_few_large_numbers_of_a_row_leave_levels_for_the_others(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor]
) -> None:
    """Without the transform the error is 0.13: the row's scale is that of the large numbers."""
    weight_OI, x_TI = normal(30, 64, 1024), normal(31, 20, 1024)
    x_TI[:, ::200] *= 30
    exact_TO = x_TI.double() @ weight_OI.double().t()
    for product in by_all(kernel_types, native, weight_OI):
        assert (product(x_TI).double() - exact_TO).norm() < 0.025 * exact_TO.norm()


@pytest.mark.parametrize("shape", [(40, 64), (2100, 288), (1025, 70)], ids=str)
def test_a_table_has_one_memory_for_rows_and_products(
    kernels: NativeKernels, normal: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    weight_OI, bias_O, x_TI = normal(32, *shape), normal(33, shape[0]), normal(34, 9, shape[1])

    def fill(first: int, out_RI: Tensor) -> None:
        assert not out_RI.any()
        out_RI.copy_(weight_OI[first : first + len(out_RI)])

    table = Int8Table.read(shape, fill, kernels)
    assert table.nbytes == Int8Table.empty(shape, kernels, torch.device("meta")).nbytes < 1.4 * weight_OI.numel()
    assert torch.equal(table.product(bias_O)(x_TI), Int8Product.of(weight_OI, bias_O, NativeKernel, kernels)(x_TI))
    levels_OI, scale_O = quantize_weight(weight_OI, None)
    rows_OI = transform_rows(levels_OI.float() * scale_O.unsqueeze(1), block_of(shape[1]))
    index_T = torch.tensor([0, shape[0] - 1, 3, 3, -1, shape[0]])
    found_TI = table.lookup(index_T)
    assert torch.equal(found_TI[:4], rows_OI[index_T[:4]])
    assert not found_TI[4:].any()
    assert (rows_OI - weight_OI).norm() < 0.02 * weight_OI.norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.long
def test_kernels_agree_on_every_bit(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    if len(kernel_types) < 2:
        pytest.skip("this CPU or torch has one kernel")
    products = by_all(kernel_types, native, normal(4, *shape), normal(5, shape[0]))
    for rows in ROWS:
        x_TI = normal(rows, rows, shape[1])
        first, *others = (product(x_TI) for product in products)
        assert all(torch.equal(first, other) for other in others)


def test_our_own_kernels_quantize_to_the_bits_of_torch(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    weight_OI, x_TI = normal(6, 96, 200), normal(7, 50, 200) * torch.logspace(-30, 30, 50).unsqueeze(1)
    expected_TO = Int8Product.of(weight_OI, None, exact_kernels(None)[0])(x_TI)
    for kind in (*exact_kernels(None), NativeKernel):
        assert torch.equal(Int8Product.of(weight_OI, None, kind, kernels)(x_TI), expected_TO)


@pytest.mark.parametrize("shape", [(250, 96), (864, 288)], ids=str)
@pytest.mark.long
def test_a_row_does_not_depend_on_its_neighbours(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    """Alone, at every place of a batch, beside a row a million times as loud and beside one that is not finite."""
    row_1I = normal(8, 1, shape[1])
    for product in by_all(kernel_types, native, normal(9, *shape), normal(10, shape[0])):
        alone_O = product(row_1I)[0]
        for rows in ROWS:
            for place in {0, rows // 2, rows - 1}:
                x_TI = normal(rows, rows, shape[1])
                x_TI[rows // 3] *= 1e6
                x_TI[rows // 4] = torch.nan
                x_TI[place] = row_1I[0]
                assert torch.equal(product(x_TI)[place], alone_O)


@pytest.mark.long
def test_the_number_of_threads_changes_no_bit(
    kernel_types: list[KernelType],
    native: NativeKernels | None,
    normal: Callable[..., Tensor],
    threads: Callable[[int], object],
) -> None:
    weight_OI, inputs = normal(11, 1100, 520), [normal(rows, rows, 520) for rows in ROWS]
    for kind in kernel_types:
        answers = []
        for count in (1, 2, 3):
            with threads(count):
                product = Int8Product.of(weight_OI, None, kind, native)
                answers.append([product(x_TI) for x_TI in inputs])
        for other in answers[1:]:
            assert all(map(torch.equal, answers[0], other))


def test_rows_and_weights_of_zeros_give_the_bias(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor]
) -> None:
    weight_OI, bias_O, x_TI = normal(12, 30, 64), normal(13, 30), normal(14, 3, 64)
    weight_OI[4], x_TI[1] = 0, 0
    for biased, plain in zip(
        by_all(kernel_types, native, weight_OI, bias_O), by_all(kernel_types, native, weight_OI), strict=True
    ):
        assert torch.equal(biased(x_TI)[1], bias_O)
        assert torch.equal(biased(x_TI)[:, 4], bias_O[4].expand(3))
        assert torch.equal(plain(x_TI)[1], torch.zeros(30))


def test_the_bias_is_added_in_float32(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor]
) -> None:
    weight_OI, bias_O, x_TI = normal(15, 30, 64), normal(16, 30) * 100, normal(17, 5, 64)
    for biased, plain in zip(
        by_all(kernel_types, native, weight_OI, bias_O), by_all(kernel_types, native, weight_OI), strict=True
    ):
        assert torch.allclose(biased(x_TI), plain(x_TI) + bias_O, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_number_makes_its_row_and_no_other_not_finite(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor], broken: float
) -> None:
    """Also in the middle of a row, where a vector instruction's maximum could drop it."""
    weight_OI = normal(18, 30, 70)
    for column in (0, 37, 69):
        x_TI = normal(19, 4, 70)
        x_TI[2, column] = broken
        for product in by_all(kernel_types, native, weight_OI):
            finite_TO = product(x_TI).isfinite()
            assert not finite_TO[2].any()
            assert finite_TO[[0, 1, 3]].all()


def test_a_broken_weight_makes_its_output_not_finite(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor]
) -> None:
    weight_OI = normal(20, 30, 64)
    weight_OI[3, 5], weight_OI[8, 60] = torch.nan, torch.inf
    for product in by_all(kernel_types, native, weight_OI):
        finite_TO = product(normal(21, 4, 64)).isfinite()
        assert [o for o in range(30) if not finite_TO[:, o].all()] == [3, 8]
        assert not finite_TO[:, [3, 8]].any()


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_rows_of_any_size_stay_finite_and_near(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor], size: float
) -> None:
    weight_OI, x_TI = normal(22, 30, 64), normal(23, 4, 64) * size
    exact_TO = x_TI.double() @ weight_OI.double().t()
    for product in by_all(kernel_types, native, weight_OI):
        error = (product(x_TI).double() - exact_TO).norm()
        assert error < max(0.02 * exact_TO.norm().item(), 64 * torch.finfo(torch.float32).tiny)


def test_the_input_is_left_as_it_was(
    kernel_types: list[KernelType], native: NativeKernels | None, normal: Callable[..., Tensor]
) -> None:
    weight_OI, x_TI = normal(24, 30, 64), normal(25, 4, 64)
    before = weight_OI.clone(), x_TI.clone()
    for product in by_all(kernel_types, native, weight_OI, torch.ones(30)):
        product(x_TI)
    assert torch.equal(weight_OI, before[0])
    assert torch.equal(x_TI, before[1])


@pytest.mark.parametrize("num_inputs", [1, 1040, 1041, 5000])
def test_floats_add_the_largest_levels_exactly(num_inputs: int) -> None:
    """The whole sum is rounded to float32 once, whatever its parts are."""
    levels_OI = torch.full((3, num_inputs), 127, dtype=torch.int8)
    levels_OI[1, ::2], levels_OI[2, 0] = -127, 126
    kernel = FloatsKernel(levels_OI, torch.ones(3), None)
    expected_O = (levels_OI.long() * 127).sum(1)
    x_TI = transform_rows(torch.full((1, num_inputs), 127.0), block_of(num_inputs)) / block_of(num_inputs)
    assert torch.equal(kernel(x_TI)[0], expected_O.float())
