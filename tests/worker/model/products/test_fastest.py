"""The choice of kernels: measured once a shape, twice packed only where that is small, both halves the same bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import fastest
from ryzanstein.worker.products.by_rows import ByRows
from ryzanstein.worker.products.fastest import FastestKernels, KernelChoice, exact_kernels
from ryzanstein.worker.products.int8 import FbgemmKernel, Int8Product, KernelType, NativeKernel


def test_a_shape_is_measured_once_and_its_choice_kept(native: NativeKernels | None, kernel_types: list[KernelType]) -> None:
    kernels = FastestKernels(native)
    first = kernels.of_shape(48, 64)
    assert kernels.of_shape(48, 64) == first
    assert set(first.kinds) <= set(kernel_types)


def test_a_large_weight_is_packed_once(native: NativeKernels | None) -> None:
    assert len(FastestKernels(native).of_shape(4097, 1024).kinds) == 1


def test_a_choice_of_one_kernel_has_one_packing(kernel_types: list[KernelType]) -> None:
    assert KernelChoice(kernel_types[0], kernel_types[0]).kinds == (kernel_types[0],)
    assert len(KernelChoice(kernel_types[0], kernel_types[-1], 8).kinds) == min(2, len(kernel_types))


def test_a_row_gets_the_same_bits_on_both_sides_of_the_choice(
    native: NativeKernels | None, kernel_types: list[KernelType], normal: Callable[..., Tensor]
) -> None:
    weight_OI, x_TI = normal(1, 200, 96), normal(2, 12, 96)
    product = ByRows(
        *(Int8Product.of(weight_OI, None, kind, native) for kind in (kernel_types[0], kernel_types[-1])), from_rows=8
    )
    alone = torch.cat([product(x_1I) for x_1I in x_TI.split(1)])
    assert torch.equal(product(x_TI), alone)
    assert torch.equal(product(x_TI[:7]), alone[:7])


def test_the_number_of_rows_decides_between_the_packings() -> None:
    product = ByRows(lambda x_TI: x_TI + 1, lambda x_TI: x_TI + 2, from_rows=3)
    assert [product(torch.zeros(rows, 1))[0].item() for rows in (1, 2, 3, 4)] == [1, 1, 2, 2]


def test_a_kernel_that_is_hopelessly_slow_is_no_choice(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's plain loop, which it takes on CPUs that it has no kernel for."""
    original = NativeKernel.__call__

    class Slow(NativeKernel):
        def __call__(self, x_TI: Tensor) -> Tensor:
            for _ in range(1000):
                product_TO = original(self, x_TI)
            return product_TO

    monkeypatch.setattr(fastest, "exact_kernels", lambda native: [Slow, NativeKernel])
    assert FastestKernels(kernels).of_shape(48, 64).kinds == (NativeKernel,)


def test_our_own_kernel_replaces_fbgemm(kernels: NativeKernels) -> None:
    assert exact_kernels(kernels)[0] is NativeKernel
    assert FbgemmKernel not in exact_kernels(kernels)
