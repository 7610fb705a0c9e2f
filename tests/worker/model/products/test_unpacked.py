"""Products with a weight as it lies, and by heads: near float64, and with bits that no other row changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.floats import ByHead, UnpackedWeight


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (7, 20), (64, 96), (1003, 257), (33, 1024)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_weight_as_it_lies(
    kernels: NativeKernels, normal: Callable[..., Tensor], num_outputs: int, num_inputs: int, biased: bool
) -> None:
    weight_OI, x_TI = normal(1, num_outputs, num_inputs), normal(2, 11, num_inputs)
    bias_O = normal(3, num_outputs) if biased else None
    product = UnpackedWeight(weight_OI, bias_O, kernels)
    exact_TO = x_TI.double() @ weight_OI.double().t() + (0 if bias_O is None else bias_O.double())
    torch.testing.assert_close(product(x_TI).double(), exact_TO, rtol=1e-5, atol=1e-5 * num_inputs**0.5)
    for count in range(1, 11):
        assert torch.equal(product(x_TI[3 : 3 + count]), product(x_TI)[3 : 3 + count])


def test_a_row_that_is_no_number_stays_alone(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    product, x_TI = UnpackedWeight(normal(1, 50, 30), None, kernels), normal(2, 6, 30)
    clean_TO = product(x_TI)
    x_TI[2, 29] = torch.nan
    spoilt_TO = product(x_TI)
    assert spoilt_TO[2].isnan().all()
    assert torch.equal(spoilt_TO[[0, 1, 3, 4, 5]], clean_TO[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(10, 20), (128, 512), (512, 128)])
def test_a_weight_for_each_head(
    kernels: NativeKernels, normal: Callable[..., Tensor], num_inputs: int, num_outputs: int
) -> None:
    weight_HIO, x_THI = normal(1, 3, num_inputs, num_outputs), normal(2, 9, 3, num_inputs)
    product = ByHead(weight_HIO, kernels)
    exact_THO = torch.einsum("thi,hio->tho", x_THI.double(), weight_HIO.double())
    torch.testing.assert_close(product(x_THI).double(), exact_THO, rtol=1e-5, atol=1e-5 * num_inputs**0.5)
    for count in range(1, 9):
        assert torch.equal(product(x_THI[:count]), product(x_THI)[:count])
