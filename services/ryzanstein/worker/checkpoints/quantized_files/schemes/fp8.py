"""FP8 as DeepSeek-V3 and Qwen write it: floats of 8 bits with a scale for each block of 128 by 128, or for a tensor.

A module has `weight` [O, I] in float8 (e4m3) and `weight_scale_inv`, by which it is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import Unpacked
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import Scales
from ryzanstein.worker.checkpoints.quantized_files.settings import one_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import SCALE_DTYPES, StoredTensors

_FLOAT8 = ("F8_E4M3",)


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    one_of(settings, "fmt", ("e4m3",), "e4m3")
    block = _block(settings)
    for module in modules_with(tensors, ".weight"):
        if tensors.entries[f"{module}.weight"].dtype in _FLOAT8:
            yield _matrix(tensors, module, block)


def _block(settings: Values) -> tuple[int, int] | None:
    if settings.optional("weight_block_size") is None:
        return None
    sizes = settings.indices("weight_block_size")
    if len(sizes) != 2 or not all(0 < size < 2**31 for size in sizes):
        raise settings.error("weight_block_size", f"must be two whole numbers above 0, got {list(sizes)[:4]}")
    return sizes[0], sizes[1]


def _matrix(tensors: StoredTensors, module: str, block: tuple[int, int] | None) -> FoundMatrix:
    levels, scales = f"{module}.weight", f"{module}.weight_scale_inv"
    shape = tensors.matrix(levels, _FLOAT8)
    num_rows, num_columns = block or shape
    if block is None:
        tensors.expect(scales, SCALE_DTYPES, (), (1,), (1, 1))
    else:
        tensors.expect(scales, SCALE_DTYPES, (-(-shape[0] // num_rows), -(-shape[1] // num_columns)))
    scale = Scales(tensors, scales, row_block=num_rows)
    matrix = QuantizedMatrix(tensors, levels, shape, Unpacked(tensors, levels), scale, None, num_columns)
    return FoundMatrix(levels, matrix, frozenset({scales}))
