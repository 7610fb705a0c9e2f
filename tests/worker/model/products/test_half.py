"""Products with weights of 16 bits against float64: exact weights, rows by themselves, what float16 cannot hold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.floats import Packed
from ryzanstein.worker.products.half import FbgemmHalfProduct, half_product
from ryzanstein.worker.refusal import ModelRefused

Half = Callable[[Tensor, Tensor | None], Product]
SHAPES = [(48, 64), (7, 5), (1, 288), (864, 288), (1100, 528)]
ROWS = (1, 2, 3, 5, 8, 17, 32, 100)


@pytest.fixture(params=["our own", "FBGEMM"])
def half(request: pytest.FixtureRequest) -> Half:
    """Our own kernel, and FBGEMM's."""
    kernels = request.getfixturevalue("kernels") if request.param == "our own" else None
    return lambda weight_OI, bias_O: half_product(weight_OI, bias_O, kernels)


def rounding(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """What float32 sums can be wrong by at most, in any order: n eps times the sum of sizes (Higham 2002, 3.1)."""
    return x_TI.shape[1] * torch.finfo(torch.float32).eps * (x_TI.abs().double() @ weight_OI.abs().double().t()) + 1e-30


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_stored_in_16_bits_lose_nothing(
    half: Half, normal: Callable[..., Tensor], shape: tuple[int, int], stored: torch.dtype
) -> None:
    weight_OI, bias_O, x_TI = normal(1, *shape).to(stored).float(), normal(2, shape[0]), normal(3, 33, shape[1])
    weight_OI[weight_OI.abs() < 2**-14] = 2**-14
    exact_TO = x_TI.double() @ weight_OI.double().t()
    for bias, expected_TO in ((None, exact_TO), (bias_O, exact_TO + bias_O.double())):
        error_TO = (half(weight_OI, bias)(x_TI).double() - expected_TO).abs()
        assert (error_TO <= rounding(x_TI, weight_OI) + 1e-6).all()


def test_float32_weights_are_rounded_to_11_bits(half: Half, normal: Callable[..., Tensor]) -> None:
    weight_OI, x_TI = normal(4, 200, 300), normal(5, 20, 300)
    error_TO = (half(weight_OI, None)(x_TI).double() - x_TI.double() @ weight_OI.double().t()).abs()
    worst_TO = x_TI.abs().double() @ weight_OI.abs().double().t() * 2**-11 + x_TI.abs().sum(1, keepdim=True) * 2**-25
    assert (error_TO <= worst_TO + rounding(x_TI, weight_OI)).all()
    assert error_TO.max() > rounding(x_TI, weight_OI).max() / 300, "nothing was rounded: this test measures nothing"


def test_small_weights_are_rounded_to_multiples_of_2_to_the_minus_24(half: Half) -> None:
    weight_OI = torch.tensor([[2.0**-24], [1.4 * 2**-24], [2.0**-26], [3 * 2.0**-24]])
    product_1O = half(weight_OI, None)(torch.tensor([[2.0**24]]))
    assert product_1O.tolist() == [[1.0, 1.0, 0.0, 3.0]]


@pytest.mark.parametrize("shape", [(250, 96), (864, 288)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(
    kernels: NativeKernels, normal: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    """Our own kernel's. FBGEMM's does not promise it: some CPUs get another order of sums for another number of rows."""
    product, row_1I = half_product(normal(6, *shape), normal(7, shape[0]), kernels), normal(8, 1, shape[1])
    alone_O = product(row_1I)[0]
    for rows in ROWS:
        for place in {0, rows // 2, rows - 1}:
            x_TI = normal(rows, rows, shape[1])
            x_TI[rows // 3] *= 1e6
            x_TI[rows // 4] = torch.nan
            x_TI[place] = row_1I[0]
            assert torch.equal(product(x_TI)[place], alone_O)


def test_the_number_of_threads_changes_no_bit(
    half: Half, normal: Callable[..., Tensor], threads: Callable[[int], object]
) -> None:
    weight_OI, inputs = normal(9, 1100, 528), [normal(rows, rows, 528) for rows in ROWS]
    answers = []
    for count in (1, 2, 3):
        with threads(count):
            product = half(weight_OI, None)
            answers.append([product(x_TI) for x_TI in inputs])
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (65520.0, "a weight of 65520.0"),
        (-1e30, "a weight of 1.0"),
        (torch.inf, "a weight of inf"),
        (torch.nan, "a weight of nan"),
    ],
)
def test_a_weight_beyond_float16_is_refused(half: Half, normal: Callable[..., Tensor], weight: float, message: str) -> None:
    weight_OI = normal(10, 30, 40)
    weight_OI[17, 3] = weight
    with pytest.raises(ModelRefused, match=message) as caught:
        half(weight_OI, None)
    assert "exceeds the float16 maximum of 65504" in str(caught.value)


def test_the_largest_weight_that_float16_has_is_served(half: Half) -> None:
    assert half(torch.full((4, 8), 65504.0), None)(torch.ones(1, 8)).tolist() == [[8 * 65504.0] * 4]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_number_makes_its_row_and_no_other_not_finite(
    half: Half, normal: Callable[..., Tensor], broken: float
) -> None:
    x_TI = normal(11, 4, 70)
    x_TI[2, 37] = broken
    finite_TO = half(normal(12, 30, 70), None)(x_TI).isfinite()
    assert not finite_TO[2].any()
    assert finite_TO[[0, 1, 3]].all()


def test_our_own_kernel_replaces_fbgemm(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    assert isinstance(half_product(normal(1, 30, 65), None, kernels), Packed)
    assert isinstance(half_product(normal(1, 30, 65), None, None), FbgemmHalfProduct)
