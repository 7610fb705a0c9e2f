"""The choice of kernels: measured once a shape, twice packed only where that is small, both halves the same bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from ryzanstein.worker.model.products.by_rows import ByRows
from ryzanstein.worker.model.products.fastest import FastestKernels, KernelChoice
from ryzanstein.worker.model.products.int8 import Int8Product, KernelType


def test_a_shape_is_measured_once_and_its_choice_kept(kernel_types: list[KernelType]) -> None:
    kernels = FastestKernels()
    first = kernels.of_shape(48, 64)
    assert kernels.of_shape(48, 64) is first or len(kernel_types) == 1
    assert set(first.kinds) <= set(kernel_types)


def test_a_large_weight_is_packed_once() -> None:
    assert len(FastestKernels().of_shape(4097, 1024).kinds) == 1


def test_a_choice_of_one_kernel_has_one_packing(kernel_types: list[KernelType]) -> None:
    assert KernelChoice(kernel_types[0], kernel_types[0]).kinds == (kernel_types[0],)
    assert len(KernelChoice(kernel_types[0], kernel_types[-1], 8).kinds) == len(kernel_types)


def test_a_row_gets_the_same_bits_on_both_sides_of_the_choice(
    kernel_types: list[KernelType], normal: Callable[..., Tensor]
) -> None:
    weight_OI, x_TI = normal(1, 200, 96), normal(2, 12, 96)
    product = ByRows(*(Int8Product(weight_OI, None, kind) for kind in (kernel_types[0], kernel_types[-1])), from_rows=8)
    alone = torch.cat([product(x_1I) for x_1I in x_TI.split(1)])
    assert torch.equal(product(x_TI), alone)
    assert torch.equal(product(x_TI[:7]), alone[:7])


def test_the_number_of_rows_decides_between_the_packings() -> None:
    product = ByRows(lambda x_TI: x_TI + 1, lambda x_TI: x_TI + 2, from_rows=3)
    assert [product(torch.zeros(rows, 1))[0].item() for rows in (1, 2, 3, 4)] == [1, 1, 2, 2]
