"""Runs a decoder as a program: one native call for a step, or one between two parts that have no ops.

The arithmetic is that of the layers' own functions, bit for bit.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_float, c_int64

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.collectives.meeting import AGAIN, failure
from ryzanstein.worker.kernels.functions.attention import ask, ask_cold
from ryzanstein.worker.kernels.functions.rows import SMALLEST_SCALE, Angles
from ryzanstein.worker.kernels.functions.steps.program import (
    SHORT,
    GroupStruct,
    OpStruct,
    ProgramFunctions,
    ProgramStruct,
    StepStruct,
)
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.step import GroupInputs, StepInputs
from ryzanstein.worker.model.program.angles import StepAngles
from ryzanstein.worker.model.program.ops import AllReduce, Call, Goal, Item, Ops, Shape, StepContext, row_bytes
from ryzanstein.worker.model.program.sizes import MOST_ROWS
from ryzanstein.worker.products.adapted import AdapterRows, AdapterSites

_FIRST_BYTES = 256 * 1024
_GROWTH = 1.5


class Program:
    """The layers of a rank, compiled into ops. It keeps all memory whose addresses they have.

    `share` is the share of layers that are ops, and not calls of Python.
    """

    def __init__(
        self,
        functions: ProgramFunctions,
        ops: Ops,
        share: float,
        collectives: Collectives,
        angles: Callable[[Tensor], Sequence[Angles]] | None,
        *,
        adapters: AdapterSites | None = None,
    ) -> None:
        """`angles` are those of positions, if they have no ops. `adapters`: its rows have some, else none may have one."""
        num_groups = max(ops.shapes, default=-1) + 1
        self._functions, self._ops = functions, ops
        self.share, self._collectives, self._meeting = share, collectives, collectives.meeting
        self._arena, self._adapters = torch.zeros(ops.width), adapters
        self._x = ops.buffer("x", ops.hidden_size)
        structs: list[OpStruct] = []
        self._items = [_items(ops.joined(goal), structs) for goal in range(len(ops.goals))]
        self._structs = (OpStruct * len(structs))(*structs)
        self._groups, self._angles = (GroupStruct * num_groups)(), StepAngles(ops.num_rotaries, ops.rotaries, angles)
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
        self._best_R, self._token_R = (c_float * MOST_ROWS)(), (c_int64 * MOST_ROWS)()
        self._step = StepStruct(
            groups=addressof(self._groups),
            rotaries=addressof(self._angles.structs),
            best=addressof(self._best_R),
            tokens=addressof(self._token_R),
        )
        self._asked: StepContext | None = None
        self._taken: tuple[StepInputs, Goal] | None = None
        self._grow(_FIRST_BYTES)

    def takes(self, inputs: StepInputs, goal: Goal = Goal.HIDDEN) -> bool:
        """Returns whether this program can run a step so far: it is small, and has no pages to compress or to bound.

        It runs none while a profile is recorded, because a profile shows operators.
        """
        if self._taken is None or self._taken[0] is not inputs or self._taken[1] != goal:
            self._taken = (inputs, goal) if self._fits(inputs, goal) else None
        return self._taken is not None and not _profiler_enabled()

    def _fits(self, inputs: StepInputs, goal: Goal) -> bool:
        num_tokens = len(inputs.ids_T)
        if (inputs.adapters is None) != (self._adapters is None):
            return False
        if goal and (goal >= len(self._items) or len(inputs.last_R) > min(self._ops.most_wanted, num_tokens)):
            return False
        return num_tokens <= MOST_ROWS and not any(map(_seals, inputs.groups))

    def hidden(self, inputs: StepInputs) -> Tensor:
        """Runs all layers. Returns the output of the last one, [T, E]. What is returned is valid until the next step.

        Raises MemoryError, always before the first collective of the layers, and what collectives raise.
        """
        self._reach(inputs, Goal.HIDDEN)
        return self._rows(self._x, self._ops.hidden_size, len(inputs.ids_T))

    def logits(self, inputs: StepInputs) -> Tensor:
        """Runs the step up to the logits of the wanted rows, and returns them, [R, W]. Raises as `hidden`."""
        self._reach(inputs, Goal.LOGITS)
        return self._rows(*self._ops.logits, len(inputs.last_R))

    def greatest(self, inputs: StepInputs) -> tuple[list[float], list[int]]:
        """Runs the whole step. Returns the greatest logit of each wanted row and its column. Raises as `hidden`."""
        self._reach(inputs, Goal.TOKENS)
        num_wanted = self._step.num_wanted
        return self._best_R[:num_wanted], self._token_R[:num_wanted]

    def _reach(self, inputs: StepInputs, goal: Goal) -> None:
        step = self._ask(inputs)
        for item in self._items[goal]:
            if isinstance(item, tuple):
                self._run(*item)
            elif isinstance(item, AllReduce):
                self._collectives.all_reduce(self._rows(item.buffer, item.width, self._step.num_tokens))
            else:
                self._call(item, step, self._step.num_tokens)

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

    def _ask(self, inputs: StepInputs) -> StepContext:
        """Tells the addresses of the inputs, unless they are those of the last step. Returns what calls get."""
        if self._adapters is not None:
            self._step.low_floats = self._adapters.low_floats  # grows when others are mapped
        if self._asked is not None and self._asked.inputs is inputs and not self._angles.change:
            return self._asked
        step, self._asked = self._step, StepContext(inputs, self._angles.of(inputs.positions_T))
        step.num_tokens, step.num_wanted = len(inputs.ids_T), len(inputs.last_R)
        step.ids, step.positions, step.last = map(Tensor.data_ptr, (inputs.ids_T, inputs.positions_T, inputs.last_R))
        if inputs.adapters is not None:
            step.segments, step.index, step.num_segments, step.num_adapted = _told(inputs.adapters)
            step.last_segments, step.last_index, step.last_num_segments, step.last_num_adapted = _told(inputs.last_adapters)
        for struct, group in zip(self._groups, inputs.groups, strict=False):
            segment = group.segments[0] if group.segments else None
            if isinstance(segment, Paged):
                struct.slots = group.slots_T.data_ptr()
                ask(struct.asked, segment.keys)
                if segment.keys.cold is not None:
                    ask_cold(struct.asked, segment.keys.cold)
        return self._asked

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


def _items(found: Sequence[Item], structs: list[OpStruct]) -> list[tuple[int, int] | AllReduce | Call]:
    """Returns the items with runs as the numbers of their ops, of which those that are new are added to `structs`."""
    items: list[tuple[int, int] | AllReduce | Call] = []
    first = 0
    for item in found:
        if isinstance(item, list):
            structs += item[max(0, len(structs) - first) :]
            items.append((first, first + len(item)))
            first += len(item)
        else:
            items.append(item)
    return items


def _told(rows: AdapterRows | None) -> tuple[int, int, int, int]:
    """Returns where segments and index are, and their lengths."""
    if rows is None:
        return 0, 0, 0, 0
    return rows.segments_S3.ctypes.data, rows.index_N.ctypes.data, len(rows.segments_S3), len(rows.index_N)


def _seals(group: GroupInputs) -> bool:
    return group.sealing is not None or group.bounding is not None


def _shape(struct: GroupStruct, shape: Shape) -> None:
    """Sets what is fixed. A group without a shape is read by no op."""
    asked = struct.asked
    asked.columns, asked.values = shape.columns, shape.columns - shape.num_kv_heads * shape.head_dim
    asked.num_kv_heads, asked.group, asked.head_dim = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim
    asked.half, asked.out_stride = shape.half, shape.num_heads * shape.head_dim
    asked.q_stride = shape.width
