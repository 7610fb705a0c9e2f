"""The tensors of a gated delta rule in a GGUF file.

llama.cpp has queries, keys and values in one tensor and gates in another. Where a checkpoint has the
value heads of each key head side by side, most of its files have the first of every key head, then the
second of every one (*tiled*).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ryzanstein.worker.architectures.mixers import DeltaNames, DeltaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.names import DELTA_GATE, FUSED, TensorRole
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import MINUS_EXP, Part

_DECAY, _CONVOLUTION, _OUT = "ssm_a", "ssm_conv1d", "ssm_out"
_BY_VALUE_HEAD = (_DECAY, "ssm_dt.bias", "ssm_alpha", "ssm_beta")

DELTAS = (FUSED, DELTA_GATE, "ssm_ba", *_BY_VALUE_HEAD, _CONVOLUTION, "ssm_norm", _OUT)
"""The names of a layer's tensors in the file."""


def as_stored(spec: DecoderSpec, dialect: Dialect) -> DecoderSpec:
    """Returns a decoder that takes the heads in the order of the file, so that every matrix can stay in its blocks."""
    names = spec.names.delta
    if names is None:
        return spec
    apart = replace(names, qkv="linear_attn.in_proj_qkv", z="linear_attn.in_proj_z")
    layers = (
        replace(layer, state=replace(layer.state, tiled=dialect.tiled)) if isinstance(layer.state, DeltaSpec) else layer
        for layer in spec.layers
    )
    return replace(spec, names=replace(spec.names, delta=apart), layers=tuple(layers))


def delta_parts(delta: DeltaSpec, names: DeltaNames, dialect: Dialect, role: TensorRole, whole: Part) -> Iterator[Part]:
    """Yields the parts of a tensor; `whole` is it, if nothing is in another order."""
    tiles = dialect.tiled and not delta.tiled and delta.num_value_heads > delta.num_key_heads
    if role.name == FUSED and names.qkv == names.z:
        yield from _by_key_head(delta, role, whole)
    elif role.name == _DECAY:
        yield from _of_value_heads(delta, replace(whole, change=MINUS_EXP), 1, 0, tiles=tiles)
    elif role.name in _BY_VALUE_HEAD:
        yield from _of_value_heads(delta, whole, 1, 0, tiles=tiles)
    elif role.name == DELTA_GATE:
        yield from _of_value_heads(delta, whole, delta.value_dim, 0, tiles=tiles)
    elif role.name == _CONVOLUTION:
        flat = replace(whole, stored_shape=(whole.shape[0], whole.shape[2]))
        yield from _of_value_heads(delta, flat, delta.value_dim, 2 * delta.num_key_heads * delta.key_dim, tiles=tiles)
    elif role.name == FUSED:
        yield from _of_value_heads(delta, whole, delta.value_dim, 2 * delta.num_key_heads * delta.key_dim, tiles=tiles)
    elif role.name == _OUT and tiles:
        yield replace(whole, tiled=(delta.num_key_heads, delta.value_dim))
    else:
        yield whole


def _of_value_heads(delta: DeltaSpec, whole: Part, size: int, before: int, *, tiles: bool) -> Iterator[Part]:
    """Yields the rows before those of value heads, each of which has `size`, and theirs."""
    if not tiles:
        yield whole
        return
    if before:
        yield replace(whole, count=before)
    num_keys, group = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    for head in range(delta.num_value_heads):
        place = head % group * num_keys + head // group
        yield replace(whole, start=before + head * size, count=size, first=before + place * size)


def _by_key_head(delta: DeltaSpec, role: TensorRole, whole: Part) -> Iterator[Part]:
    """Yields what a checkpoint has of each key head side by side: its queries, keys, values and gates."""
    num_keys, keys = delta.num_key_heads, delta.key_dim
    values = delta.num_value_heads // num_keys * delta.value_dim
    fused, gates = (role.tensor(name, ".weight") for name in (FUSED, DELTA_GATE))
    fused_shape, gates_shape = ((rows, whole.shape[1]) for rows in (delta.channels, num_keys * values))
    start = 0
    for head in range(num_keys):
        firsts = (head * keys, (num_keys + head) * keys, 2 * num_keys * keys + head * values)
        for first, count in zip(firsts, (keys, keys, values), strict=True):
            yield replace(whole, name=fused, stored_shape=fused_shape, start=start, count=count, first=first)
            start += count
        yield replace(whole, name=gates, stored_shape=gates_shape, start=start, count=values, first=head * values)
        start += values
