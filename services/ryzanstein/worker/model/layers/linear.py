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
from ryzanstein.worker.model.parallel import HeadShare, TensorParallel

_TRANSPOSED_BYTES = 4 * 2**20


def by_inputs(weight_OI: Tensor) -> Tensor:
    """The weight as a product wants it, [I, O].

    Small ones are laid out anew: with rows of outputs the product takes 0.55 to 0.8 of the time (docs/measurements.md). Large
    ones stay a view: there it wins nothing, and transposing would cost more than loading.
    """
    weight_IO = weight_OI.t()
    return weight_IO.contiguous() if weight_OI.nbytes <= _TRANSPOSED_BYTES else weight_IO


def product(x_TI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x times weight, plus bias where there is one."""
    return torch.mm(x_TI, weight_IO) if bias_O is None else torch.addmm(bias_O, x_TI, weight_IO)


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of one projection: `count` from `start` on, of `total`."""

    name: str
    total: int
    start: int
    count: int


class ColumnParallelLinear:
    """One or several projections of the same input, stacked in memory: one matrix product for all of them."""

    def __init__(self, source: WeightSource, num_inputs: int, projections: Sequence[Rows], *, bias: bool) -> None:
        counts = [rows.count for rows in projections]
        weight_OI = source.new(sum(counts), num_inputs)
        self._bias_O = source.new(sum(counts)) if bias else None
        for rows, part_OI in zip(projections, torch.split(weight_OI, counts), strict=True):
            source.read(f"{rows.name}.weight", (rows.total, num_inputs), part_OI, start=rows.start)
        if self._bias_O is not None:
            for rows, part_O in zip(projections, torch.split(self._bias_O, counts), strict=True):
                source.read(f"{rows.name}.bias", (rows.total,), part_O, start=rows.start)
        self._weight_IO = by_inputs(weight_OI)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return product(x_TI, self._weight_IO, self._bias_O)


def qkv_linear(
    source: WeightSource,
    names: tuple[str, str, str],
    num_inputs: int,
    heads: tuple[int, int, int],
    share: HeadShare,
    *,
    bias: bool,
) -> ColumnParallelLinear:
    """Query, key and value in one product. `heads` are all query heads, all key-value heads and the dimension of one."""
    num_heads, num_kv_heads, head_dim = heads
    query = Rows(names[0], num_heads * head_dim, share.first_head * head_dim, share.num_heads * head_dim)
    key, value = (
        Rows(name, num_kv_heads * head_dim, share.first_kv_head * head_dim, share.num_kv_heads * head_dim) for name in names[1:]
    )
    return ColumnParallelLinear(source, num_inputs, (query, key, value), bias=bias)


def gate_up_linear(
    source: WeightSource, tp: TensorParallel, names: tuple[str, str], num_inputs: int, num_outputs: int, *, bias: bool
) -> ColumnParallelLinear:
    """The gate and the up projection of an MLP in one product: this rank's gates first, then its ups."""
    count = tp.split(num_outputs, "MLP columns")
    projections = [Rows(name, num_outputs, tp.rank * count, count) for name in names]
    return ColumnParallelLinear(source, num_inputs, projections, bias=bias)


class RowParallelLinear:
    """A projection of which each rank holds some input columns; the sum over ranks is its one all-reduce.

    The bias is added by rank 0 only, so that the sum has it once.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, name: str, num_inputs: int, num_outputs: int, *, bias: bool
    ) -> None:
        count = tp.split(num_inputs, f"inputs of {name}")
        self._collectives = tp.collectives
        weight_OI = source.new(num_outputs, count)
        source.read(f"{name}.weight", (num_outputs, num_inputs), weight_OI, dim=1, start=tp.rank * count)
        self._weight_IO = by_inputs(weight_OI)
        bias_O = source.new(num_outputs) if bias else None
        if bias_O is not None:
            source.read(f"{name}.bias", (num_outputs,), bias_O)
        self._bias_O = bias_O if tp.rank == 0 else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._collectives.all_reduce(product(x_TI, self._weight_IO, self._bias_O))
