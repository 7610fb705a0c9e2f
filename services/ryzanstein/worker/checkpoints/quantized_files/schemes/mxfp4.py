"""MXFP4 as OpenAI writes gpt-oss: the experts of a layer in one tensor, 4-bit floats with a scale for each 32 inputs.

The format is that of the Open Compute Project (Microscaling Formats, 2023). `gate_up_proj_blocks` is
[experts, 2 I, H / 32, 16], where a gate's row is followed by its up's, `down_proj_blocks` [experts, H, I / 32, 16]. A byte has
two successive inputs, the first one in its lower half. `_scales` are without the last dimension: exponents of two, plus 127.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import FLOAT4_ZERO, Float4, StackedRows
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import Powers, SameZero
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import StoredTensors

_INPUTS, _BYTES = 32, 16
_MAX_MATRICES = 2**17
"""Of all layers together; the largest known model has 13,824. Each is listed by itself."""
_PROJECTIONS = (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    num_matrices = 0
    for stored, projections in _PROJECTIONS:
        for module in modules_with(tensors, f".{stored}_blocks"):
            for found in _matrices(tensors, module, stored, projections):
                num_matrices += 1
                if num_matrices > _MAX_MATRICES:
                    raise tensors.error(found.matrix.stored, f"is one of more than {_MAX_MATRICES} matrices of experts")
                yield found


def _matrices(tensors: StoredTensors, module: str, stored: str, projections: tuple[str, ...]) -> Iterator[FoundMatrix]:
    blocks, scales = f"{module}.{stored}_blocks", f"{module}.{stored}_scales"
    shape, step = tensors.find(blocks).shape, len(projections)
    if len(shape) != 4 or shape[3] != _BYTES or not all(shape) or shape[1] % step:
        raise tensors.error(blocks, f"has shape {list(shape)}, needs experts, outputs, blocks and {_BYTES} bytes")
    tensors.expect(blocks, ("U8",), shape)
    tensors.expect(scales, ("U8",), shape[:3])
    num_experts, num_rows, num_blocks, _ = shape
    for expert in range(num_experts):
        for first, name in enumerate(projections):
            rows = StackedRows(expert, first, step)
            matrix = QuantizedMatrix(
                tensors,
                blocks,
                (num_rows // step, num_blocks * _INPUTS),
                Float4(tensors, blocks, rows),
                Powers(tensors, scales, rows),
                SameZero(FLOAT4_ZERO),
                _INPUTS,
                "4-bit floats",
            )
            yield FoundMatrix(f"{module}.{expert}.{name}.weight", matrix, frozenset({blocks, scales}))
