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

from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.stored import StoredWeight, stacked_product
from ryzanstein.worker.products.adapted import AdaptableWeight, AdapterRows, AdapterSite, Piece
from ryzanstein.worker.products.native import NativeStack, native_weights


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

    `transposed` weights are stored as [inputs, outputs]. `adaptable`: adapters may add to them.
    """

    def __init__(
        self,
        source: WeightSource,
        num_inputs: int,
        projections: Sequence[Rows],
        *,
        bias: bool,
        transposed: bool = False,
        adaptable: bool = True,
    ) -> None:
        shapes = [(rows.name, (rows.total, num_inputs), rows.pieces) for rows in projections]
        parts = [
            StoredWeight(source, f"{name}.weight", shape, transposed).rows(start, count)
            for name, shape, pieces in shapes
            for start, count in pieces
        ]
        self._product = stacked_product(source, parts, _read_bias(source, projections) if bias else None)
        self._site = open_site(source, num_inputs, projections) if adaptable else None

    def __call__(self, x_TI: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Returns the product. `rows`: those of x that have an adapter."""
        out_TO = self._product(x_TI)
        if rows is not None and self._site is not None:
            self._site.add(x_TI, out_TO, rows)
        return out_TO

    def native(self) -> NativeStack:
        """Returns the weights in the memory of our own kernels, if these multiply."""
        return NativeStack(native_weights(self._product), None if self._site is None else self._site.address)


def open_site(source: WeightSource, num_inputs: int, projections: Sequence[Rows]) -> AdapterSite:
    """Returns where adapters add to stacked projections of the same input."""
    totals = {rows.name: rows.total for rows in projections}
    numbers = {name: number for number, name in enumerate(totals)}
    pieces: list[Piece] = []
    column = 0
    for rows in projections:
        for start, count in rows.pieces:
            pieces.append((numbers[rows.name], start, count, column))
            column += count
    weights = [AdaptableWeight(name, num_inputs, total, (0, num_inputs)) for name, total in totals.items()]
    return source.adapters.open(weights, pieces)


def _read_bias(source: WeightSource, projections: Sequence[Rows]) -> Tensor:
    bias_O = source.new(sum(rows.count for rows in projections))
    first = 0
    for rows in projections:
        for start, count in rows.pieces:
            source.read(f"{rows.name}.bias", (rows.total,), bias_O.narrow(0, first, count), start=start)
            first += count
    return bias_O


class RowParallelLinear:
    """A projection of which each rank holds some input columns: `own`, the first one and their number.

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
        own: tuple[int, int],
        bias: bool,
        transposed: bool = False,
        adaptable: bool = True,
    ) -> None:
        stored = StoredWeight(source, f"{name}.weight", (num_outputs, num_inputs), transposed)
        bias_O = source.new(num_outputs) if bias else None
        if bias_O is not None:
            source.read(f"{name}.bias", (num_outputs,), bias_O)
        parts = [stored.columns(*own)]
        self._product = stacked_product(source, parts, bias_O if tp.rank == 0 else None)
        weight = AdaptableWeight(name, num_inputs, num_outputs, own, adds_bias=tp.rank == 0 and own[0] == 0)
        self._site = source.adapters.open([weight], [(0, 0, num_outputs, 0)]) if adaptable else None

    def __call__(self, x_TI: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Returns this rank's part of the product. `rows`: those of x that have an adapter."""
        out_TO = self._product(x_TI)
        if rows is not None and self._site is not None:
            self._site.add(x_TI, out_TO, rows)
        return out_TO

    def native(self) -> NativeStack:
        """Returns the weights in the memory of our own kernels, if these multiply."""
        return NativeStack(native_weights(self._product), None if self._site is None else self._site.address)
