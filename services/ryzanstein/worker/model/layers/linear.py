"""Linear layers over ranks, split by columns or by rows.

Split by columns, each rank computes some outputs; split by rows, each rank reads some inputs and
the results are summed. Megatron's pair (Shoeybi et al. 2019), a split by columns followed by a
split by rows, costs a single all-reduce.

Legend: T tokens, I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of a stored projection of `total` rows: successive pieces (start, count)."""

    name: str
    total: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(count for _, count in self.pieces)


class ColumnParallelLinear:
    """One or more projections of the same input, stacked in memory for a single matrix product.

    `transposed` weights are stored as [inputs, outputs].
    """

    def __init__(
        self, source: WeightSource, num_inputs: int, projections: Sequence[Rows], *, bias: bool, transposed: bool = False
    ) -> None:
        num_outputs = sum(rows.count for rows in projections)
        weight_OI = source.new(num_outputs, num_inputs)
        bias_O = source.new(num_outputs) if bias else None
        first = 0
        for name, total, start, count in _pieces(projections):
            part_OI = weight_OI.narrow(0, first, count)
            _read_weight(source, name, (total, num_inputs), part_OI, start=start, transposed=transposed)
            if bias_O is not None:
                source.read(f"{name}.bias", (total,), bias_O.narrow(0, first, count), start=start)
            first += count
        self._product = source.product(weight_OI, bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI)


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
    """A projection of which each rank holds some input columns.

    It returns this rank's part of a sum over all ranks. Only rank 0 adds the bias, so that the sum
    has it once.
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
        bias_O = source.new(num_outputs) if bias else None
        if bias_O is not None:
            source.read(f"{name}.bias", (num_outputs,), bias_O)
        self._product = source.product(weight_OI, bias_O if tp.rank == 0 else None)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI)
