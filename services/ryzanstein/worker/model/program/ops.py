"""The ops of a program, which layers add while it is built.

Buffers are arrays of `MOST_ROWS` rows in one arena, named by their offset in floats.

Legend: T tokens, E hidden size, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.collectives.meeting import PLACES
from ryzanstein.worker.collectives.parallel import HeadShare
from ryzanstein.worker.kernels.functions.rows import ACTIVATIONS, Angles
from ryzanstein.worker.kernels.functions.steps.program import ACTIVATE, ADAPT, ADD, PRODUCT, REDUCE, WEIGHT_KINDS, OpStruct
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.program.sizes import MOST_ROWS
from ryzanstein.worker.products.native import NativeStack, NativeWeight

_NONE = -1
_MOST_GROUPS = 64  # of step.c
_PLACES = {
    "qkv": "qkv",
    "attended": "attention",
    "y": "o",
    "gates": "gate-up",
    "activated": "gate-up",
    "x": "down",
    "z": "down",
}
_WHOLE = 16  # floats of a cache line, and of the widest vector


class Goal(IntEnum):
    """How far a program runs: to the last layer, to the logits of the wanted rows, or to their greatest ones."""

    HIDDEN, LOGITS, TOKENS = range(3)


class NotNative(Exception):
    """A part of a layer has no ops. The message names the part."""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm of rows: x / rms(x) * (offset + weight)."""

    weight_E: Tensor
    eps: float
    offset: float


class Last(NamedTuple):
    """The last product of half a layer, which is still to be added, and the buffer that it reads."""

    stack: NativeStack
    source: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A sum over all ranks of a buffer's rows, between two runs of ops."""

    buffer: int
    width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What attention of a group's layers has in common: heads, their size, and whether slots hold float16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    columns: int
    half: bool
    width: int

    @classmethod
    def of(cls, share: HeadShare, head_dim: int, pages: LayerPages, width: int) -> Shape:
        """Returns the shape of a rank's heads. `width`: that of a row of queries, keys and values."""
        slots_NC = pages.slots_NC
        return cls(share.num_heads, share.num_kv_heads, head_dim, slots_NC.shape[1], slots_NC.dtype == torch.float16, width)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The inputs of a step, for parts that run in Python."""

    inputs: StepInputs
    angles: Sequence[Angles]


CalledPart = Callable[[Tensor, StepContext], Tensor | None]


@dataclass(frozen=True, slots=True)
class Call:
    """A part without ops: a function from a buffer's rows, of width `width`, to those of `out`.

    It may change its argument in place and return None.
    """

    source: int
    width: int
    out: int
    function: CalledPart


Item = list[OpStruct] | AllReduce | Call


@runtime_checkable
class HasOps(Protocol):
    """A half of a layer that has ops."""

    def emit(self, ops: Ops, source: int, norm: RowNorm | None, *pages: LayerPages) -> Last:
        """Adds its ops but for the last product. Raises NotNative."""
        ...


def has_ops(half: object) -> HasOps:
    """Returns the half. Raises NotNative if it has no ops."""
    if not isinstance(half, HasOps):
        raise NotNative(f"{type(half).__name__} has no ops")
    return half


@dataclass(slots=True)
class Ops:
    """Ops under construction, in runs that Python interrupts. `kept` are the tensors whose addresses they have."""

    hidden_size: int
    num_ranks: int
    meets: bool
    """Whether ranks meet in C."""
    adapting: bool = False
    """Whether rows may have adapters: what they add comes between a product and what is done with its result."""
    items: list[Item] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    layer: int = 0
    place: str = ""
    """What is computed, as the board shows it."""
    reason: str = ""
    """Why the first part without ops has none."""
    width: int = 0
    most_inputs: int = 0
    logits: tuple[int, int] = (0, 0)
    """Their buffer and its width."""
    most_wanted: int = 0
    """The most rows of logits."""
    goals: list[int] = field(default_factory=list)
    """How many items there are up to each goal."""
    num_rotaries: int = 0
    rotaries: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Of each rotary embedding: how many numbers of a head it rotates, and whether pairs are neighbours."""
    shapes: dict[int, Shape] = field(default_factory=dict)
    _buffers: dict[tuple[str, int], int] = field(default_factory=dict)

    def buffer(self, name: str, width: int, most_rows: int = MOST_ROWS) -> int:
        """Returns the buffer of that name and width. All layers share it."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.width
            self.width += most_rows * -(-width // _WHOLE) * _WHOLE
        return self._buffers[name, width]

    def end_goal(self) -> None:
        """Ends the items of a goal, the first one first."""
        self.goals.append(len(self.items))
        self.items.append([])

    def either(self, emit: Callable[[], None], call: Call) -> float:
        """Adds what `emit` adds, or a call if it raises NotNative. Returns 1, or 0 for the call."""
        self.items.append([])
        begin = len(self.items) - 1
        try:
            emit()
        except NotNative as reason:
            self.items[begin:] = [call]
            self.reason = self.reason or str(reason)
            return 0.0
        return 1.0

    def call(self, source: int, width: int, function: CalledPart, out: int | None = None) -> None:
        """Adds a part without ops, whose result is in `out`, or where the source was."""
        self.items.append(Call(source, width, source if out is None else out, function))

    def joined(self, goal: int) -> list[Item]:
        """Returns the items up to a goal, adjacent runs of ops as one."""
        found: list[Item] = []
        for item in self.items[: self.goals[goal]]:
            if isinstance(item, list) and found and isinstance(found[-1], list):
                found[-1] = found[-1] + item
            else:
                found.append(item)
        return found

    def address(self, tensor: Tensor | None) -> int | None:
        """Returns where a tensor is, and keeps it."""
        if tensor is None:
            return None
        self.kept.append(tensor)
        return tensor.data_ptr()

    def add(self, op: int, **fields: Any) -> None:
        """Adds an op to the run."""
        fields = {"residual": _NONE, "activation": _NONE, "rotary": _NONE, "factor": 1.0} | fields
        if not self.items or not isinstance(self.items[-1], list):
            self.items.append([])
        run = self.items[-1]
        assert isinstance(run, list)
        run.append(OpStruct(op=op, layer=self.layer, place=PLACES.index(self.place), **fields))

    def share(self, group: int, shape: Shape) -> None:
        """Tells the shape of attention in a group's layers. Raises NotNative if another layer has another one."""
        if group >= _MOST_GROUPS:
            raise NotNative(f"over {_MOST_GROUPS} groups of layers")
        if self.shapes.setdefault(group, shape) != shape:
            raise NotNative("layers of one group with other heads")

    def pages(self, pages: LayerPages) -> dict[str, int | None]:
        """Returns the addresses of what a layer writes and reads. Raises NotNative."""
        if pages.bounds_B2Y is not None or pages.beyond:
            raise NotNative("pages with bounds, or of several planes")
        if pages.slots_NC.dtype not in (torch.float32, torch.float16):
            raise NotNative(f"a cache of {pages.slots_NC.dtype}")
        return {"pages": self.address(pages.slots_NC), "cold": self.address(pages.cold_BX)}

    def head_norms(self, norms: tuple[RowNorm, RowNorm] | None) -> dict[str, Any]:
        """Returns the norms of each query and of each key."""
        if norms is None:
            return {}
        query, key = norms
        weights = {"query_norm": self.address(query.weight_E), "key_norm": self.address(key.weight_E)}
        return weights | {"eps": query.eps, "offset": query.offset}

    def product(self, stack: NativeStack, source: int, name: str, *, norm: RowNorm | None = None, **fields: Any) -> int:
        """Adds a product of the buffer `source`, and returns the buffer of the result. Raises NotNative."""
        if not stack.weights:
            raise NotNative("a product is of another kernel")
        self.place = _PLACES.get(name, self.place)
        stride = stack.width
        out, first = self.buffer(name, stride), 0
        if self.adapting:
            self._adapted_product(stack, self.normed(stack.weights[0].shape[1], source, norm), out, **fields)
            return out
        for weight in stack.weights:
            places = {"residual": fields["residual"] + first} if "residual" in fields else {}
            self.multiply(weight, source, out + first, norm, stride=stride, **fields | places)
            first += weight.shape[0]
        return out

    def normed(self, width: int, source: int, norm: RowNorm | None) -> int:
        """Adds a norm of rows, and returns the buffer of its result; without one that of the source."""
        if norm is None:
            return source
        normed = self.buffer("normed", width)
        self.add(ADD, in_=source, out=normed, num_inputs=width, **self._norm(norm))
        return normed

    def _adapted_product(
        self, stack: NativeStack, source: int, out: int, *, activation: int = _NONE, residual: int = _NONE, factor: float = 1.0
    ) -> None:
        """Adds a product, what adapters add to it, and then what is done with the result."""
        first, stride, num_inputs = 0, stack.width, stack.weights[0].shape[1]
        for weight in stack.weights:
            self.multiply(weight, source, out + first, None, stride=stride)
            first += weight.shape[0]
        if stack.site is not None:
            self.add(ADAPT, in_=source, out=out, weight=stack.site, num_inputs=num_inputs, stride=stride)
        if activation != _NONE:
            self.add(ACTIVATE, in_=out, out=out, num_inputs=stride, activation=activation)
        if residual != _NONE or factor != 1:
            self.add(ADD, in_=out, out=out, residual=residual, num_inputs=stride, factor=factor)

    def gated_product(self, stack: NativeStack, source: int, norm: RowNorm | None, activation: str, width: int) -> int:
        """Adds a product with gates and then ups, and activation(gate) * up. Returns the buffer of that. Raises NotNative."""
        out, kind = self.buffer("activated", width), ACTIVATIONS[activation]
        if len(stack.weights) == 1 and width % _WHOLE == 0 and not self.adapting:
            self.product(stack, source, "gates", norm=norm, activation=kind, gated=1, residual=out)
        else:
            gates = self.product(stack, source, "gates", norm=norm)
            self.add(ACTIVATE, in_=gates, out=out, num_inputs=width, activation=kind, gated=1)
        return out

    def end_half(self, last: Last, out: str, residual: int, *, norm: RowNorm | None, factor: float) -> int:
        """Adds the last product of a half, its sum over ranks, a norm and a factor, and the residual. Raises NotNative."""
        if self.num_ranks == 1 and norm is None:
            return self.product(*last, out, residual=residual, factor=factor)
        found = self.all_reduced(self.product(*last, out))
        self.rows(found, found, norm=norm, factor=factor, residual=residual)
        return found

    def all_reduced(self, buffer: int) -> int:
        """Adds the sum of a buffer of the hidden size over all ranks."""
        if self.num_ranks > 1 and self.meets:
            self.add(REDUCE, in_=buffer, num_inputs=self.hidden_size)
        elif self.num_ranks > 1:
            self.items.append(AllReduce(buffer, self.hidden_size))
        return buffer

    def rows(self, source: int, out: int, *, residual: int = _NONE, norm: RowNorm | None = None, factor: float = 1.0) -> None:
        """Adds out = norm(source) * factor + residual, of rows of the hidden size."""
        self.add(ADD, in_=source, out=out, residual=residual, num_inputs=self.hidden_size, factor=factor, **self._norm(norm))

    def multiply(
        self, weight: NativeWeight, source: int, out: int, norm: RowNorm | None, *, op: int = PRODUCT, **fields: Any
    ) -> None:
        """Adds a product with one weight. `op`: of all rows, or of those that are wanted."""
        self.most_inputs = max(self.most_inputs, weight.shape[1])
        self.add(op, in_=source, out=out, **self.weight(weight), **self._norm(norm), **fields)

    def weight(self, weight: NativeWeight) -> dict[str, Any]:
        """Returns where a weight is, and what it is like."""
        num_outputs, num_inputs = weight.shape
        return {
            "kind": WEIGHT_KINDS[weight.kind],
            "type": weight.type,
            "weight": self.address(weight.weight),
            "scale": self.address(weight.scale_O),
            "bias": self.address(weight.bias_O),
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "block": weight.block,
        }

    def _norm(self, norm: RowNorm | None) -> dict[str, Any]:
        if norm is None:
            return {}
        return {"norm": self.address(norm.weight_E), "eps": norm.eps, "offset": norm.offset}


def row_bytes(num_inputs: int) -> int:
    """Returns at least the bytes of a quantized row, of any kind of product."""
    return 64 + 48 * math.ceil(num_inputs / 32) + 4 * math.ceil(num_inputs / 4)
