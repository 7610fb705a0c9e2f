"""The experts of a layer that are stored as one tensor, as Qwen 3 VL's and Granite's mixtures are: a tensor for each expert.

transformers 5 keeps them as [experts, outputs, inputs], the hub as [experts, inputs, outputs]. The first
are rows of the file; of the others an expert's matrix is the transpose of some columns. gpt-oss has biases,
and each gate's column is followed by its up's.

Legend: N experts, H hidden size, I columns of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ryzanstein.worker.checkpoints.tensor_entry import ITEM_BYTES, TensorEntry

_STACKS = (
    (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj", ".mlp.experts"),
    (".experts.gate_up_proj", ".experts.down_proj", ".experts"),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts"),
)
"""The ends of the names of gates with ups and of downs, and of what each expert's tensors are named after."""
_GATE_UP_BIASES, _DOWN_BIASES = ".mlp.experts.gate_up_proj_bias", ".mlp.experts.down_proj_bias"
_MAX_EXPERTS = 4096


def separate_experts(entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Returns the entries with one for each projection of each expert, where they are stacked; else the same."""
    found = dict(entries)
    interleaved = _separate_biases(found)
    for gate_ups, downs, own in _STACKS:
        for layer in [name.removesuffix(gate_ups) for name in found if name.endswith(gate_ups)]:
            gate_up, down = entries[layer + gate_ups], entries.get(layer + downs)
            apart = None if down is None else _apart(gate_up, down, interleaved=layer in interleaved)
            if apart is not None:
                del found[layer + gate_ups], found[layer + downs]
                found |= {f"{layer}{own}.{name}": entry for name, entry in apart}
    return found


def stacked_name(name: str) -> str | None:
    """Returns the tensor that has this projection of an expert in every checkpoint; None: it may be its own.

    So are Granite's and Gemma 4's.
    """
    gate_ups, downs, own = _STACKS[-1] if _STACKS[-1][2] in name else _STACKS[1]
    layer, _, projection = name.partition(own)
    if layer.endswith((".mlp", ".mixer")):
        return None
    if projection.endswith((".gate_proj.weight", ".up_proj.weight")):
        return layer + gate_ups
    return layer + downs if projection.endswith(".down_proj.weight") else None


def _separate_biases(found: dict[str, TensorEntry]) -> frozenset[str]:
    """Puts biases of each expert into the place of stacked ones. Returns the layers that have them."""
    layers = [name.removesuffix(_GATE_UP_BIASES) for name in found if name.endswith(_GATE_UP_BIASES)]
    for layer in layers:
        gate_up, down = found[layer + _GATE_UP_BIASES], found.get(layer + _DOWN_BIASES)
        known = down is not None and {gate_up.dtype, down.dtype} <= set(ITEM_BYTES)
        if down is None or not known or [len(gate_up.shape), len(down.shape)] != [2, 2] or gate_up.shape[0] != down.shape[0]:
            continue
        if not 0 < gate_up.shape[0] <= _MAX_EXPERTS or gate_up.shape[1] % 2:
            continue
        del found[layer + _GATE_UP_BIASES], found[layer + _DOWN_BIASES]
        for expert in range(gate_up.shape[0]):
            pairs, name = _matrix(gate_up, expert), f"{layer}.mlp.experts.{expert}"
            found[f"{name}.gate_proj.bias"], found[f"{name}.up_proj.bias"] = (_every_other(pairs, first) for first in (0, 1))
            found[f"{name}.down_proj.bias"] = _matrix(down, expert)
    return frozenset(layers)


def _every_other(pairs: TensorEntry, first: int) -> TensorEntry:
    """Returns every other number of a row of a bias, or every other column of a matrix, transposed."""
    half = pairs.shape[-1] // 2
    matrix = replace(pairs, shape=(1, pairs.shape[0])) if len(pairs.shape) == 1 else pairs
    shape = (half, *pairs.shape[:-1])
    return replace(pairs, shape=shape, num_bytes=pairs.num_bytes // 2, columns_of=matrix, first_column=first, step=2)


def _apart(gate_up: TensorEntry, down: TensorEntry, *, interleaved: bool) -> Iterator[tuple[str, TensorEntry]] | None:
    """Returns the tensors of all experts by the ends of their names; None: the shapes do not fit each other."""
    known = {gate_up.dtype, down.dtype} <= set(ITEM_BYTES) and len(gate_up.shape) == len(down.shape) == 3
    if not known or gate_up.shape[0] != down.shape[0] or not 0 < gate_up.shape[0] <= _MAX_EXPERTS:
        return None
    (_, rows, columns), (_, down_rows, down_columns) = gate_up.shape, down.shape
    if (rows, columns) == (2 * down_columns, down_rows):
        return _by_rows(gate_up, down)
    if (rows, columns) != (down_columns, 2 * down_rows):
        return None
    return _by_columns(gate_up, down, interleaved=interleaved)


def _by_rows(gate_up_NGH: TensorEntry, down_NHI: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    half = gate_up_NGH.shape[1] // 2
    for expert in range(gate_up_NGH.shape[0]):
        whole = _matrix(gate_up_NGH, expert)
        yield f"{expert}.gate_proj.weight", _rows(whole, 0, half)
        yield f"{expert}.up_proj.weight", _rows(whole, half, half)
        yield f"{expert}.down_proj.weight", _matrix(down_NHI, expert)


def _by_columns(gate_up_NHG: TensorEntry, down_NIH: TensorEntry, *, interleaved: bool) -> Iterator[tuple[str, TensorEntry]]:
    half = gate_up_NHG.shape[2] // 2
    for expert in range(gate_up_NHG.shape[0]):
        whole, down_IH = _matrix(gate_up_NHG, expert), _matrix(down_NIH, expert)
        halves = [_every_other(whole, first) if interleaved else _transposed(whole, first * half, half) for first in (0, 1)]
        yield f"{expert}.gate_proj.weight", halves[0]
        yield f"{expert}.up_proj.weight", halves[1]
        yield f"{expert}.down_proj.weight", _transposed(down_IH, 0, down_IH.shape[1])


def _matrix(stacked: TensorEntry, expert: int) -> TensorEntry:
    num_bytes = math.prod(stacked.shape[1:]) * ITEM_BYTES[stacked.dtype]
    return replace(stacked, shape=stacked.shape[1:], offset=stacked.offset + expert * num_bytes, num_bytes=num_bytes)


def _rows(matrix: TensorEntry, first: int, count: int) -> TensorEntry:
    row_bytes = matrix.shape[1] * ITEM_BYTES[matrix.dtype]
    shape, num_bytes = (count, matrix.shape[1]), count * row_bytes
    return replace(matrix, shape=shape, offset=matrix.offset + first * row_bytes, num_bytes=num_bytes)


def _transposed(matrix: TensorEntry, first: int, count: int) -> TensorEntry:
    shape, num_bytes = (count, matrix.shape[0]), count * matrix.shape[0] * ITEM_BYTES[matrix.dtype]
    return replace(matrix, shape=shape, num_bytes=num_bytes, columns_of=matrix, first_column=first)
