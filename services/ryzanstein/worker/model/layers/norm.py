"""RMS norm (Zhang and Sennrich 2019), the same on every rank."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.model.layers.source import WeightSource


class RMSNorm:
    """Divides by the root of the mean square over the hidden size, then scales by a weight."""

    def __init__(self, source: WeightSource, name: str, hidden_size: int, eps: float) -> None:
        self._eps = eps
        self._weight_E = source.new(hidden_size)
        source.read(f"{name}.weight", (hidden_size,), self._weight_E)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return F.rms_norm(x_TE, self._weight_E.shape, self._weight_E, self._eps)
