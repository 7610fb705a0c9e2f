"""Finds what `quantization_config` of config.json describes among the tensors of a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.files import QuantizedFiles
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix
from ryzanstein.worker.checkpoints.quantized_files.schemes import awq, bitnet, compressed_tensors, fp8, gptq, mxfp4
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import StoredTensors
from ryzanstein.worker.checkpoints.safetensors_files import SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.refusal import CheckpointError


@dataclass(frozen=True, slots=True)
class _Format:
    """`unread`: endings of tensors that no product of ours needs."""

    find: Callable[[StoredTensors, Values], Iterator[FoundMatrix]]
    unread: tuple[str, ...] = ()


_FORMATS: Mapping[str, _Format] = {
    "gptq": _Format(gptq.find),
    "awq": _Format(awq.find),
    "compressed-tensors": _Format(compressed_tensors.find, compressed_tensors.UNREAD),
    "fp8": _Format(fp8.find, (".input_scale", ".activation_scale")),
    "bitnet": _Format(bitnet.find),
    "mxfp4": _Format(mxfp4.find),
}


def open_quantized(
    model_dir: Path, config: Mapping[str, Any], spec: DecoderSpec, entries: Mapping[str, TensorEntry]
) -> tuple[DecoderSpec, QuantizedFiles]:
    """Returns the decoder and the tensors of a directory whose config.json has a `quantization_config`.

    A head that is quantized is not tied. Raises CheckpointError, which names the tensor and the file.
    """
    if spec.transposed:
        raise CheckpointError(
            f"config.json: quantized weights of model_type {spec.model_type!r} are not read: floats would be transposed"
        )
    settings = Values(config, where="").table("quantization_config")
    chosen = _FORMATS[settings.config["quant_method"]]
    tensors = StoredTensors(model_dir, entries, SafetensorsFiles(model_dir, entries))
    with closing(tensors.files):
        found = list(chosen.find(tensors, settings))
    if not found:
        raise CheckpointError(f"{model_dir}: config.json has a quantization_config, but no tensor is quantized")
    for each in found:
        if each.name in entries and each.name != each.matrix.stored:
            raise tensors.error(each.name, f"is the matrix that {each.matrix.stored} is as well")
    matrices = {each.name: each.matrix for each in found}
    unread = {name for name in entries if name.endswith(chosen.unread)}.union(*(each.parts for each in found))
    tied = spec.tied_head and f"{spec.names.head}.weight" not in matrices
    return replace(spec, tied_head=tied), QuantizedFiles(tensors, matrices, frozenset(unread))
