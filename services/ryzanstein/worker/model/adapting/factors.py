"""The factors of a packed adapter, as the layers of a decoder take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.worker.adapters.packing import Packed, PackedWeight, open_packed
from ryzanstein.worker.products.adapted import LowRankFactors


def mapped_factors(path: Path, adaptable: Mapping[str, tuple[int, int]], device: torch.device) -> Mapping[str, LowRankFactors]:
    """Returns the factors in a file by the weight that they adapt: on a CPU in the memory of the file.

    Raises ValueError if a weight is not adaptable or of another shape; OSError.
    """
    packed = open_packed(path)
    for name, weight in packed.items():
        if adaptable.get(name) != (len(weight.a_IR), weight.b_RO.shape[1]):
            raise ValueError(f"{path}: {name} is of another model")
    return {name: _factors(weight, device) for name, weight in packed.items()}


def _factors(weight: PackedWeight, device: torch.device) -> LowRankFactors:
    bias_O = None if weight.bias_O is None else _tensor(weight.bias_O, device)
    return LowRankFactors(_tensor(weight.a_IR, device), _tensor(weight.b_RO, device), bias_O, weight.scale)


def _tensor(numbers: Packed, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers).to(device)
