"""The kernels, compiled once for all tests; random numbers, and a number of threads for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from ryzanstein.worker.model.kernels.build import library
from ryzanstein.worker.model.kernels.native import NativeKernels


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled by this session from the source as it is."""
    return library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def kernels(built: Path) -> NativeKernels:
    return NativeKernels(built)


@pytest.fixture(scope="session")
def normal() -> Callable[..., torch.Tensor]:
    """Normal numbers of a shape: `normal(seed, *shape)`."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers


@pytest.fixture(scope="session")
def threads() -> Callable[[int], AbstractContextManager[None]]:
    """`with threads(2): ...`"""

    @contextmanager
    def use(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use
