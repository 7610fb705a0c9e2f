"""Random weights and rows, the 8-bit kernels of this CPU, and a number of threads for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from ryzanstein.worker.model.products.fastest import available_kernels
from ryzanstein.worker.model.products.int8 import KernelType


@pytest.fixture(scope="session")
def kernel_types() -> list[KernelType]:
    return available_kernels()


@pytest.fixture(scope="session")
def normal() -> Callable[..., torch.Tensor]:
    """Normal numbers of a shape: `normal(seed, *shape)`."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers


@pytest.fixture
def threads() -> Callable[[int], object]:
    """`with threads(4): ...`"""

    @contextmanager
    def use(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use
