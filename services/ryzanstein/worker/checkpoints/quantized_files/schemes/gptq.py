"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it.

A module has `qweight` [I * bits / 32, O], words of successive inputs; `qzeros` [G, O * bits / 32];
`scales` [G, O]; `g_idx` [I], the group of each input, which act-order scatters. Zero points of
checkpoint_format gptq are stored less one, those of gptq_v2 as they are. With 3 bits, of which some are in
two words, AutoGPTQ takes one from each zero point and GPTQModel a constant from each word: only gptq_v2 is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import PackedDown
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import GptqZeros, Scales
from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import WIDTHS, WORD_BITS
from ryzanstein.worker.checkpoints.quantized_files.settings import group_size, one_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import SCALE_DTYPES, StoredTensors

_FORMATS = ("gptq", "gptq_v2")


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    bits, group = one_of(settings, "bits", WIDTHS), group_size(settings)
    key = "checkpoint_format" if settings.optional("checkpoint_format") is not None else "format"
    minus_one = one_of(settings, key, _FORMATS, "gptq") == "gptq"
    if minus_one and bits == 3:
        raise settings.error(
            "bits", "3 is only supported with checkpoint_format 'gptq_v2': writers of 'gptq' disagree about its zero points"
        )
    one_of(settings, "pack_dtype", ("int32",), "int32")
    for key in ("is_marlin_format", "dynamic"):
        if settings.optional(key):
            raise settings.error(key, "is not supported")
    for module in modules_with(tensors, ".qweight"):
        yield _matrix(tensors, module, bits, group, minus_one=minus_one)


def _matrix(tensors: StoredTensors, module: str, bits: int, group: int | None, *, minus_one: bool) -> FoundMatrix:
    levels, zeros, scales, index = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    num_words, num_outputs = tensors.matrix(levels, ("I32",))
    if num_words * WORD_BITS % bits or num_outputs * bits % WORD_BITS:
        raise tensors.error(levels, f"has shape {[num_words, num_outputs]}, which levels of {bits} bits do not fill")
    num_inputs = num_words * WORD_BITS // bits
    group = min(group or num_inputs, num_inputs)
    num_groups = -(-num_inputs // group)
    tensors.expect(zeros, ("I32",), (num_groups, num_outputs * bits // WORD_BITS))
    tensors.expect(scales, SCALE_DTYPES, (num_groups, num_outputs))
    has_index = index in tensors.entries
    if has_index:
        tensors.expect(index, ("I32", "I64"), (num_inputs,))
    matrix = QuantizedMatrix(
        tensors,
        levels,
        (num_outputs, num_inputs),
        PackedDown(tensors, levels, bits),
        Scales(tensors, scales, down=True),
        GptqZeros(tensors, zeros, bits, minus_one),
        group,
        "8 bits" if bits == 8 else "4 bits",
        index if has_index else None,
    )
    parts = {levels, zeros, scales, *((index,) if has_index else ()), *_zero_bias(tensors, f"{module}.bias", num_outputs)}
    return FoundMatrix(f"{module}.weight", matrix, frozenset(parts))


def _zero_bias(tensors: StoredTensors, name: str, num_outputs: int) -> tuple[str, ...]:
    """Returns the name of a bias that adds nothing. AutoGPTQ gives one to every module."""
    if name not in tensors.entries:
        return ()
    tensors.expect(name, SCALE_DTYPES, (num_outputs,))
    return () if bool(tensors.whole(name).any()) else (name,)
