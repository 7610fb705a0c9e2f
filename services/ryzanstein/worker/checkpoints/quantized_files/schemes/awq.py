"""AWQ (Lin et al. 2023) as AutoAWQ's version "gemm" writes it.

A module has `qweight` [I, O / 8], words of eight successive outputs, even ones first; `qzeros` [G, O / 8],
packed alike; `scales` [G, O].
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import InterleavedAcross
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import AwqZeros, Scales
from ryzanstein.worker.checkpoints.quantized_files.settings import group_size, one_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import SCALE_DTYPES, StoredTensors

_PER_WORD = 8


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    one_of(settings, "bits", (4,))
    key = "version" if settings.optional("version") is not None else "format"
    version = settings.optional(key)
    one_of(Values({key: version.lower() if isinstance(version, str) else version}, settings.where), key, ("gemm",), "gemm")
    one_of(settings, "zero_point", (True,), True)
    group = group_size(settings)
    for module in modules_with(tensors, ".qweight"):
        yield _matrix(tensors, module, group)


def _matrix(tensors: StoredTensors, module: str, group: int | None) -> FoundMatrix:
    levels, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    num_inputs, num_words = tensors.matrix(levels, ("I32",))
    group = min(group or num_inputs, num_inputs)
    num_groups, num_outputs = -(-num_inputs // group), num_words * _PER_WORD
    tensors.expect(zeros, ("I32",), (num_groups, num_words))
    tensors.expect(scales, SCALE_DTYPES, (num_groups, num_outputs))
    matrix = QuantizedMatrix(
        tensors,
        levels,
        (num_outputs, num_inputs),
        InterleavedAcross(tensors, levels),
        Scales(tensors, scales, down=True),
        AwqZeros(tensors, zeros),
        group,
        "4 bits",
    )
    return FoundMatrix(f"{module}.weight", matrix, frozenset({levels, zeros, scales}))
