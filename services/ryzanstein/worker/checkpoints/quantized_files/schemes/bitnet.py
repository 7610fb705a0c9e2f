"""BitNet b1.58 (Ma et al. 2024) as transformers writes it: ternary levels, four in a byte, and one scale.

A module has `weight` [O / 4, I] and `weight_scale` [1]: a factor of linear_class autobitlinear, a divisor of bitlinear.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import Ternary, ternary_rows
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import SameZero, Scales
from ryzanstein.worker.checkpoints.quantized_files.settings import one_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import SCALE_DTYPES, StoredTensors


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    linear = one_of(settings, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    one_of(settings, "quantization_mode", ("offline",), "offline")
    one_of(settings, "use_rms_norm", (False,), False)
    for module in modules_with(tensors, ".weight"):
        if tensors.entries[f"{module}.weight"].dtype == "U8":
            yield _matrix(tensors, module, divided=linear == "bitlinear")


def _matrix(tensors: StoredTensors, module: str, *, divided: bool) -> FoundMatrix:
    levels, scales = f"{module}.weight", f"{module}.weight_scale"
    stored_rows, num_inputs = tensors.matrix(levels, ("U8",))
    tensors.expect(scales, SCALE_DTYPES, (), (1,))
    scale = Scales(tensors, scales, reciprocal=divided)
    shape = ternary_rows(stored_rows), num_inputs
    matrix = QuantizedMatrix(tensors, levels, shape, Ternary(tensors, levels), scale, SameZero(1), num_inputs, "ternary")
    return FoundMatrix(levels, matrix, frozenset({scales}))
