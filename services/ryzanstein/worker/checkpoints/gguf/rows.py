"""Rows of a checkpoint's tensors, read from a GGUF file as float32, a window at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Order, Part
from ryzanstein.worker.checkpoints.gguf.file import GgufFile, GgufTensor
from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers
from ryzanstein.worker.refusal import CheckpointError

WINDOW_NUMBERS = 2**20


def checked_tensor(file: GgufFile, part: Part) -> GgufTensor:
    """Returns the tensor that a part is in. Raises CheckpointError if it is missing or has another shape."""
    tensor = file.tensor(part.name)
    if tensor.shape != part.stored_shape:
        shapes = f"has shape {list(tensor.shape)}, the metadata need {list(part.stored_shape)}"
        raise CheckpointError(f"{file.path}: tensor {part.name} {shapes}")
    return tensor


def read_rows(file: GgufFile, parts: Sequence[Part], first: int, count: int) -> Iterator[tuple[int, Numbers]]:
    """Yields `count` rows of a checkpoint's tensor from `first` on: the first row's number, and the rows.

    `parts` are those of the tensor, in order.
    """
    for part in parts:
        begin, end = max(first, part.start), min(first + count, part.start + part.count)
        if begin < end:
            yield from _part_rows(file.tensor(part.name), part, begin, end)


def _part_rows(tensor: GgufTensor, part: Part, begin: int, end: int) -> Iterator[tuple[int, Numbers]]:
    if part.transposed:
        stored = _floats(tensor, part, slice(part.first, part.first + part.stored_count))
        yield begin, np.ascontiguousarray(stored[:, begin - part.start : end - part.start].T)
        return
    order, step = part.rows_of_file(), max(1, WINDOW_NUMBERS // part.width)
    for row in range(begin, end, step):
        local = slice(row - part.start, min(row + step, end) - part.start)
        rows = slice(part.first + local.start, part.first + local.stop) if order is None else part.first + order[local]
        numbers = _floats(tensor, part, rows)
        yield row, part.from_file(numbers)


def _floats(tensor: GgufTensor, part: Part, rows: slice | Order) -> Numbers:
    if part.stored_width % tensor.type.numbers:  # a vector in blocks
        return dequantize(tensor.blocks, tensor.type).reshape(-1, part.stored_width)[rows]
    row_bytes = tensor.type.row_bytes(part.stored_width)
    blocks = np.frombuffer(tensor.blocks, np.uint8).reshape(-1, row_bytes)[rows]
    return dequantize(blocks.reshape(-1), tensor.type).reshape(len(blocks), part.stored_width)
