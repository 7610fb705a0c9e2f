"""RMS norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), the same on every rank."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.spec import NormSpec
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.program.ops import NotNative, Ops, RowNorm


class Norm(Protocol):
    """A norm of vectors. It keeps the shape and does not change its input."""

    def __call__(self, x_TE: Tensor) -> Tensor: ...


def new_norm(source: WeightSource, name: str, size: int, spec: NormSpec) -> Norm:
    """Returns a norm over the last dimension, which has `size` numbers."""
    return (RMSNorm if spec.kind == "rms" else LayerNorm)(source, name, size, spec)


def optional_norm(source: WeightSource, prefix: str, name: str | None, size: int, spec: NormSpec) -> Norm:
    """Returns the norm `prefix` + `name`, or one that does nothing if `name` is None."""
    return Unchanged() if name is None else new_norm(source, prefix + name, size, spec)


def row_norm(norm: Norm) -> RowNorm | None:
    """Returns a norm as a program has it, None for one that does nothing. Raises NotNative."""
    if isinstance(norm, Unchanged):
        return None
    if not isinstance(norm, RMSNorm):
        raise NotNative("a layer norm")
    return norm.native()


def emit_norm(ops: Ops, norm: Norm, source: int) -> tuple[int, RowNorm | None]:
    """Returns a buffer and the norm that a product begins with. A layer norm has no ops: it is called before."""
    if not isinstance(norm, LayerNorm):
        return source, row_norm(norm)
    normed = ops.buffer("normed", ops.hidden_size)
    ops.call(source, ops.hidden_size, lambda x_TE, _: norm(x_TE), normed)
    return normed, None


class Unchanged:
    """The identity, for architectures without a norm."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        return x_TE


class RMSNorm:
    """A norm that divides by the root mean square, then scales by the weight, or by one plus it, if it has one."""

    def __init__(self, source: WeightSource, name: str, size: int, spec: NormSpec) -> None:
        self._eps, self._plus_one = spec.eps, spec.plus_one
        self._rows = None if source.kernels is None else source.kernels.rows
        self._weight_E = source.new(size)
        if spec.weight:
            source.read(f"{name}.weight", (size,), self._weight_E)
        else:
            self._weight_E.fill_(1)

    def __call__(self, x_TE: Tensor) -> Tensor:
        if self._rows is not None:
            return self._rows.rms_norm(x_TE, self._weight_E, self._eps, float(self._plus_one))
        if not self._plus_one:
            return F.rms_norm(x_TE, self._weight_E.shape, self._weight_E, self._eps)
        normed_TE = F.rms_norm(x_TE, self._weight_E.shape, None, self._eps)  # 1 + weight would lose the weight's low bits
        return torch.addcmul(normed_TE, normed_TE, self._weight_E)

    def native(self) -> RowNorm:
        """Returns it as a program has it."""
        return RowNorm(self._weight_E, self._eps, float(self._plus_one))


class LayerNorm:
    """A norm that subtracts the mean and divides by the deviation.

    Scale and shift follow if the architecture has them; the scale may be one plus the weight.
    """

    def __init__(self, source: WeightSource, name: str, size: int, spec: NormSpec) -> None:
        self._eps, self._shape, self._plus_one = spec.eps, (size,), spec.plus_one
        self._weight_E = source.new(size) if spec.weight else None
        self._bias_E = source.new(size) if spec.bias else None
        for part, suffix in ((self._weight_E, "weight"), (self._bias_E, "bias")):
            if part is not None:
                source.read(f"{name}.{suffix}", (size,), part)

    def __call__(self, x_TE: Tensor) -> Tensor:
        if not self._plus_one or self._weight_E is None:
            return F.layer_norm(x_TE, self._shape, self._weight_E, self._bias_E, self._eps)
        normed_TE = F.layer_norm(x_TE, self._shape, None, None, self._eps)
        scaled_TE = torch.addcmul(normed_TE, normed_TE, self._weight_E)
        return scaled_TE if self._bias_E is None else scaled_TE.add_(self._bias_E)
