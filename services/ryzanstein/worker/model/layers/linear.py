"""Linear layers over ranks: split by columns (each rank makes some outputs) or by rows (each sees some inputs, one sum).

Megatron's pair (Shoeybi et al. 2019): a split by columns followed by one by rows costs a single all-reduce.

Legend: T tokens, I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.parallel import TensorParallel

_TRANSPOSED_BYTES = 4 * 2**20


def by_inputs(weight_OI: Tensor) -> Tensor:
    """The weight as a product wants it, [I, O].

    Small ones are laid out anew: a product mostly takes 0.45 to 0.8 of the time that it takes with rows of outputs
    (docs/measurements.md). Large ones stay a view: there it wins nothing, and transposing would cost more than loading.
    """
    weight_IO = weight_OI.t()
    return weight_IO.contiguous() if weight_OI.nbytes <= _TRANSPOSED_BYTES else weight_IO


def product(x_TI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x times weight, plus bias where there is one."""
    return torch.mm(x_TI, weight_IO) if bias_O is None else torch.addmm(bias_O, x_TI, weight_IO)


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of one stored projection of `total` rows: pieces (start, count), one after the other."""

    name: str
    total: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(count for _, count in self.pieces)


class ColumnParallelLinear:
    """One or several projections of the same input, stacked in memory: one matrix product for all of them.

    `transposed` weights are stored as [inputs, outputs].
    """

    def __init__(
        self, source: WeightSource, num_inputs: int, projections: Sequence[Rows], *, bias: bool, transposed: bool = False
    ) -> None:
        num_outputs = sum(rows.count for rows in projections)
        weight_OI = source.new(num_outputs, num_inputs)
        self._bias_O = source.new(num_outputs) if bias else None
        first = 0
        for name, total, start, count in _pieces(projections):
            part_OI = weight_OI.narrow(0, first, count)
            _read_weight(source, name, (total, num_inputs), part_OI, start=start, transposed=transposed)
            if self._bias_O is not None:
                source.read(f"{name}.bias", (total,), self._bias_O.narrow(0, first, count), start=start)
            first += count
        self._weight_IO = by_inputs(weight_OI)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return product(x_TI, self._weight_IO, self._bias_O)


def _pieces(projections: Sequence[Rows]) -> list[tuple[str, int, int, int]]:
    return [(rows.name, rows.total, start, count) for rows in projections for start, count in rows.pieces]


def _read_weight(
    source: WeightSource, name: str, shape: tuple[int, int], out_OI: Tensor, *, dim: int = 0, start: int, transposed: bool
) -> None:
    if transposed:
        source.read(f"{name}.weight", shape[::-1], out_OI.t(), dim=1 - dim, start=start)
    else:
        source.read(f"{name}.weight", shape, out_OI, dim=dim, start=start)


class RowParallelLinear:
    """A projection of which each rank holds some input columns. What it returns is this rank's part of a sum over all ranks.

    The bias is added by rank 0 only, so that the sum has it once.
    """

    def __init__(
        self,
        source: WeightSource,
        tp: TensorParallel,
        name: str,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        count = tp.split(num_inputs, f"inputs of {name}")
        weight_OI = source.new(num_outputs, count)
        shape, start = (num_outputs, num_inputs), tp.rank * count
        _read_weight(source, name, shape, weight_OI, dim=1, start=start, transposed=transposed)
        self._weight_IO = by_inputs(weight_OI)
        bias_O = source.new(num_outputs) if bias else None
        if bias_O is not None:
            source.read(f"{name}.bias", (num_outputs,), bias_O)
        self._bias_O = bias_O if tp.rank == 0 else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return product(x_TI, self._weight_IO, self._bias_O)
