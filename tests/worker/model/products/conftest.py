"""Random weights and rows, the kernels of this CPU, and a number of threads for a while."""

from collections.abc import Callable

import pytest
import torch

from ryzanstein.worker.kernels.build import NotBuilt, library
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.fastest import exact_kernels
from ryzanstein.worker.products.int8 import FloatsKernel, KernelType


@pytest.fixture(scope="session")
def kernels() -> NativeKernels:
    """Our own."""
    try:
        return NativeKernels(library())
    except NotBuilt as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> NativeKernels | None:
    """None, and our own."""
    return request.getfixturevalue("kernels") if request.param == "native" else None


@pytest.fixture(scope="session")
def kernel_types(native: NativeKernels | None) -> list[KernelType]:
    """The 8-bit kernels that are exact: torch's, the one for any CPU, and beside `native` also our own."""
    return list(dict.fromkeys([*([] if native is None else exact_kernels(native)), *exact_kernels(None), FloatsKernel]))


@pytest.fixture(scope="session")
def normal() -> Callable[..., torch.Tensor]:
    """Normal numbers of a shape: `normal(seed, *shape)`."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers
