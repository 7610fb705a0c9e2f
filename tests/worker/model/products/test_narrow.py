"""Our own products as CPUs with narrower registers and fewer instructions compute them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.floats import Packed
from ryzanstein.worker.products.int8 import Int8Product, NativeKernel

SHAPES = [(7, 5), (33, 130), (250, 96)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 13)
# Each is compiled: two levels that CPUs have are tried with every change.
OPTIONS = [
    pytest.param("-mno-avx512vnni", marks=pytest.mark.lab),
    "-mno-avx512f",
    pytest.param("-mno-avx512f -mno-avxvnni", marks=pytest.mark.lab),
    pytest.param("-mno-avx2", marks=pytest.mark.lab),
    "-mno-avx",
    pytest.param("-mno-f16c -mno-avx512f", marks=pytest.mark.lab),
]


@pytest.fixture(params=OPTIONS)
def narrow(request: pytest.FixtureRequest, compiled_with: Callable[[str], NativeKernels]) -> NativeKernels:
    return compiled_with(request.param)


def test_products_are_the_same(narrow: NativeKernels, kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    """Whole numbers to the bit. Sums of floats add the same numbers in the same order, but may round products first."""
    for shape in SHAPES:
        weight_OI, bias_O = normal(1, *shape), normal(2, shape[0])
        for rows in ROWS:
            x_TI = normal(rows, rows, shape[1])
            ours, theirs = (Int8Product.of(weight_OI, bias_O, NativeKernel, native)(x_TI) for native in (narrow, kernels))
            assert torch.equal(ours, theirs)
            for dtype in (torch.float32, torch.float16):
                ours, theirs = (Packed(weight_OI, bias_O, native, dtype)(x_TI) for native in (narrow, kernels))
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_the_largest_levels_do_not_overflow(narrow: NativeKernels) -> None:
    for sign in (1, -1):
        weight_OI, x_TI = torch.ones(20, 4096), torch.full((3, 4096), float(sign) * 127)
        product_TO = Int8Product.of(weight_OI, None, NativeKernel, narrow)(x_TI)
        assert torch.allclose(product_TO, torch.tensor(sign * 127 * 4096.0))
