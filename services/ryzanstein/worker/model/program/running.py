"""Runs a decoder's layers as a program: one native call for all of them, or one between two parts that have no ops.

The arithmetic is that of the layers' own functions, bit for bit.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.collectives.meeting import AGAIN, failure
from ryzanstein.worker.kernels.functions.attention import ask, ask_cold
from ryzanstein.worker.kernels.functions.rows import SMALLEST_SCALE, Angles
from ryzanstein.worker.kernels.functions.steps.program import (
    SHORT,
    AnglesStruct,
    GroupStruct,
    OpStruct,
    ProgramFunctions,
    ProgramStruct,
    StepStruct,
)
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.step import GroupInputs, StepInputs
from ryzanstein.worker.model.program.ops import AllReduce, Call, Ops, Shape, StepContext, row_bytes
from ryzanstein.worker.model.program.sizes import MOST_ROWS

_FIRST_BYTES = 256 * 1024
_GROWTH = 1.5


class Program:
    """The layers of a rank, compiled into ops. It keeps all memory whose addresses they have.

    `share` is the share of layers that are ops, and not calls of Python.
    """

    def __init__(
        self, functions: ProgramFunctions, ops: Ops, share: float, num_rotaries: int, collectives: Collectives
    ) -> None:
        num_groups = max(ops.shapes, default=-1) + 1
        self._functions, self._ops = functions, ops
        self.share, self._collectives, self._meeting = share, collectives, collectives.meeting
        self._arena = torch.zeros(ops.width)
        self._x = ops.buffer("x", ops.hidden_size)
        self._items: list[tuple[int, int] | AllReduce | Call] = []
        structs: list[OpStruct] = []
        for item in ops.joined():
            if isinstance(item, list):
                self._items.append((len(structs), len(structs) + len(item)))
                structs += item
            else:
                self._items.append(item)
        self._structs = (OpStruct * len(structs))(*structs)
        self._groups, self._rotaries = (GroupStruct * num_groups)(), (AnglesStruct * max(num_rotaries, 1))()
        for group, shape in ops.shapes.items():
            _shape(self._groups[group], shape)
        self._program = ProgramStruct(
            ops=addressof(self._structs),
            num_ops=len(structs),
            num_groups=num_groups,
            threads=torch.get_num_threads(),
            arena=self._arena.data_ptr(),
            most_inputs=-(-ops.most_inputs // 16) * 16,
            most_row_bytes=row_bytes(ops.most_inputs),
            smallest=SMALLEST_SCALE,
            meeting=None if self._meeting is None else addressof(self._meeting),
        )
        self._step = StepStruct(groups=addressof(self._groups), rotaries=addressof(self._rotaries))
        self._grow(_FIRST_BYTES)

    def takes(self, inputs: StepInputs) -> bool:
        """Returns whether this program can run a step: it is small, and has no pages to compress or to bound.

        It runs none while a profile is recorded, because a profile shows operators.
        """
        return len(inputs.ids_T) <= MOST_ROWS and not any(map(_seals, inputs.groups)) and not _profiler_enabled()

    def run(self, x_TE: Tensor, step: StepContext) -> Tensor:
        """Returns the output of the last layer.

        Raises MemoryError, always before the first collective of the layers, and what collectives raise.
        """
        num_tokens, width = x_TE.shape
        out_TE = self._rows(self._x, width, num_tokens).copy_(x_TE)
        self._ask(num_tokens, step.inputs, step.angles)
        for item in self._items:
            if isinstance(item, tuple):
                self._run(*item)
            elif isinstance(item, AllReduce):
                self._collectives.all_reduce(self._rows(item.buffer, item.width, num_tokens))
            else:
                self._call(item, step, num_tokens)
        return out_TE

    def _call(self, item: Call, step: StepContext, num_tokens: int) -> None:
        found = item.function(self._rows(item.source, item.width, num_tokens), step)
        if found is not None:
            self._rows(item.out, found.shape[1], num_tokens).copy_(found)

    def _run(self, first: int, last: int) -> None:
        again = False
        while status := self._functions.run(self._program, self._step, (first, last), again):
            if status == SHORT:
                self._grow(int(self._program.needed_bytes * _GROWTH))
            elif status == AGAIN:  # handlers of signals have run
                first, again = self._program.reached, True
            else:
                assert self._meeting is not None
                raise failure(self._meeting, status)

    def _ask(self, num_tokens: int, inputs: StepInputs, angles: Sequence[Angles]) -> None:
        self._step.num_tokens = num_tokens
        for struct, group in zip(self._groups, inputs.groups, strict=False):
            segment = group.segments[0] if group.segments else None
            if isinstance(segment, Paged):
                struct.slots = group.slots_T.data_ptr()
                ask(struct.asked, segment.keys)
                if segment.keys.cold is not None:
                    ask_cold(struct.asked, segment.keys.cold)
        for struct, each in zip(self._rotaries, angles, strict=False):
            struct.cos, struct.sin = each.cos_T1R.data_ptr(), each.sin_T1R.data_ptr()
            struct.num_rotated, struct.interleaved = each.cos_T1R.shape[-1], each.interleaved

    def _rows(self, buffer: int, width: int, num_rows: int) -> Tensor:
        return self._arena[buffer : buffer + num_rows * width].view(num_rows, width)

    def _grow(self, nbytes: int) -> None:
        """Replaces the working memory, in whole cache lines. Raises MemoryError."""
        try:
            self._memory = torch.empty(nbytes + 64, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"no memory for a step: {nbytes} bytes") from error
        self._program.memory = (self._memory.data_ptr() + 63) // 64 * 64
        self._program.memory_bytes = nbytes


def _seals(group: GroupInputs) -> bool:
    return group.sealing is not None or group.bounding is not None


def _shape(struct: GroupStruct, shape: Shape) -> None:
    """Sets what is fixed. A group without a shape is read by no op."""
    asked = struct.asked
    asked.columns, asked.values = shape.columns, shape.columns - shape.num_kv_heads * shape.head_dim
    asked.num_kv_heads, asked.group, asked.head_dim = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim
    asked.half, asked.out_stride = shape.half, shape.num_heads * shape.head_dim
    asked.q_stride = shape.width
