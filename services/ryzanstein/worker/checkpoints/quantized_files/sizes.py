"""The sizes of a quantized checkpoint's matrices, from headers alone and without torch: for who only estimates memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry

KEPT = "groups"
"""The dtype of an entry that stays in blocks, of which `num_bytes` has the size."""

_PARTS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx")
_LEVELS = (".qweight", ".weight_packed", ".weight")
_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
_QUANTIZED = ("I32", "I8", "U8", "F8_E4M3")
_FLOAT4_BLOCKS, _FLOAT4_SCALES, _FLOAT4_BLOCK = "_proj_blocks", "_proj_scales", 16
_WORD_BITS, _PART, _PART_BYTES = 32, 32, 4


def unpacked_entries(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Returns the tensors with whole matrices in place of what describes them. Other tensors stay.

    What is wrong in the files is not noticed: ranks refuse it.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return entries
    return {entry.name: entry for entry in _unpacked(settings, entries)}


def _unpacked(settings: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> Iterator[TensorEntry]:
    bits, may_keep = min(_numbers(settings), default=4), _has_groups_of_blocks(settings)
    for name, entry in entries.items():
        ending = next((ending for ending in _LEVELS if name.endswith(ending)), None)
        if name.rpartition(".")[2] in _PARTS or name.endswith(_FLOAT4_SCALES):
            continue
        if name.endswith(_FLOAT4_BLOCKS):
            num_blocks = entry.num_bytes // _FLOAT4_BLOCK
            yield replace(entry, name=name, dtype=KEPT, num_bytes=num_blocks * (_FLOAT4_BLOCK + 2))
            continue
        if ending is None or entry.dtype not in _QUANTIZED or len(entry.shape) != 2:
            yield replace(entry, name=name)
            continue
        module = name.removesuffix(ending)
        matrix = replace(entry, name=f"{module}.weight", shape=_shape(settings, entry, ending, bits))
        scale = next((entries[module + scale] for scale in _SCALES if module + scale in entries), None)
        # A BF16 scale is a float16 unless it is below 2^-17: a matrix with such a group becomes floats after all.
        halves = scale is not None and scale.dtype in ("F16", "BF16")
        if halves and may_keep and entry.dtype != "F8_E4M3" and not matrix.shape[1] % _PART:
            kept_bits = 8 if entry.dtype == "I8" or bits == 8 else 4
            numbers = matrix.shape[0] * matrix.shape[1]
            matrix = replace(matrix, dtype=KEPT, num_bytes=numbers * kept_bits // 8 + numbers // _PART * _PART_BYTES)
        yield matrix


def _shape(settings: Mapping[str, Any], entry: TensorEntry, ending: str, bits: int) -> tuple[int, int]:
    rows, columns = entry.shape
    if ending == ".weight":
        return (4 * rows, columns) if entry.dtype == "U8" else (rows, columns)
    if ending == ".weight_packed":
        return rows, columns * _WORD_BITS // bits
    if settings.get("quant_method") == "awq":
        return columns * _WORD_BITS // bits, rows
    return columns, rows * _WORD_BITS // bits


def _has_groups_of_blocks(settings: Mapping[str, Any]) -> bool:
    """Whether blocks can have the groups of all matrices, and a scale that is multiplied by."""
    divided = settings.get("quant_method") == "bitnet" and settings.get("linear_class") != "autobitlinear"
    return not (divided or settings.get("desc_act") or any(size % _PART for size in _group_sizes(settings)))


def _group_sizes(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yields the inputs of each group that the settings name, unless it is all inputs."""
    for table in _tables(settings):
        block = table.get("block_structure")
        sizes = block[1:] if isinstance(block, list) else [table.get("group_size")]
        yield from (size for size in sizes if isinstance(size, int) and size != -1)


def _tables(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the tables that say how weights are quantized."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    yield from (table for table in (settings, *weights) if isinstance(table, dict))


def _numbers(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yields all numbers of bits that the settings name."""
    for table in _tables(settings):
        bits = table.get("bits") or table.get("num_bits")
        if isinstance(bits, int) and 1 < bits <= _WORD_BITS:
            yield bits
