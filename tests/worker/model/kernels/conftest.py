"""Random numbers."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(scope="session")
def normal() -> Callable[..., torch.Tensor]:
    """Normal numbers of a shape: `normal(seed, *shape)`."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers
