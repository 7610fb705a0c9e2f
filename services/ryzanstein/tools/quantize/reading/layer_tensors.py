"""The stored tensors of one layer as they will be written: read when asked for, replaced by what folding makes of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.worker.refusal import CheckpointError


class LayerTensors:
    """Whole tensors in float32, by their stored names. Each has the dtype in which it is written."""

    def __init__(self, weights: LayerWeights, dtypes: Mapping[str, torch.dtype]) -> None:
        self._weights, self._dtypes = weights, dtypes
        self._replaced: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights.shapes

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor. Raises CheckpointError if it has a number that is not finite."""
        if name in self._replaced:
            return self._replaced[name]
        tensor = self._weights.floats(name)
        if not tensor.isfinite().all():
            raise CheckpointError(f"tensor {name} has a NaN or an infinity, and cannot be quantized")
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._replaced[name] = tensor

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what reading will give once the tensor is written."""
        return tensor.to(self._dtypes[name]).float()

    def written(self, name: str) -> Tensor:
        """Returns a tensor in the dtype in which it is written."""
        return self[name].to(self._dtypes[name])

    @property
    def replaced(self) -> Mapping[str, Tensor]:
        return self._replaced
