"""Which numbers of a GGUF file's tensors are those of which tensor of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ryzanstein.worker.architectures.mixers import DeltaSpec, MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.deltas import DELTAS, delta_parts
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.names import (
    CORRECTION,
    DECAY,
    FUSED,
    GATE_UPS,
    GATES,
    KEY,
    LATENT,
    QUERY,
    SKIP,
    STATE_NORM,
    UPS,
    VALUE,
    TensorRole,
    roles,
)
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import MINUS_EXP, PLUS_ONE, Part
from ryzanstein.worker.refusal import CheckpointError


def tensor_parts(
    spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], dialect: Dialect, stored: Mapping[str, Any] | None = None
) -> list[Part]:
    """Returns the parts of every tensor of a decoder, in order; `shapes` has them by name.

    `stored` has the tensors of a file that is read: it may have some of them fused that are not
    written so. Raises CheckpointError for a tensor that llama.cpp's files do not have.
    """
    known, names = roles(spec, dialect), stored or {}
    parts: list[Part] = []
    for source, shape in shapes.items():
        base, _, kind = source.rpartition(".")
        role = known.get(source) or known.get(base)
        if role is None:
            raise CheckpointError(f"tensor {source} has no counterpart in a GGUF file of architecture {dialect.name}")
        parts += _parts(spec, dialect, role, _New(source, shape, "" if source in known else f".{kind}"), names)
    return parts


@dataclass(frozen=True, slots=True)
class _New:
    """A tensor of a checkpoint that has no place yet."""

    source: str
    shape: tuple[int, ...]
    kind: str

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def part(self, name: str, stored_shape: tuple[int, ...], start: int, count: int, **changes: Any) -> Part:
        return Part(self.source, self.shape, name, stored_shape, start, count, **changes)


def _parts(spec: DecoderSpec, dialect: Dialect, role: TensorRole, new: _New, stored: Mapping[str, Any]) -> Iterator[Part]:
    heads = {QUERY: spec.num_heads, KEY: spec.num_kv_heads}.get(role.name) if dialect.permuted else None
    fused = role.tensor(FUSED, new.kind)
    delta = None if role.layer is None else spec.layers[role.layer].state
    if isinstance(delta, DeltaSpec) and spec.names.delta is not None and role.name in DELTAS:
        whole = new.part(role.tensor(role.name, new.kind), new.shape, 0, new.num_rows)
        yield from delta_parts(delta, spec.names.delta, dialect, role, whole)
    elif role.name == LATENT and role.tensor(LATENT, new.kind) not in stored:
        yield from _latent(spec, role, new)
    elif role.name == FUSED and (dialect.split_qkv or spec.qkv_layout == "grouped"):
        yield from _grouped(spec, dialect, role, new)
    elif role.name in (QUERY, KEY, VALUE) and fused in stored:
        yield _of_fused(spec, role, new, fused, heads)
    elif role.count is not None:
        yield _stacked(role, new, stored)
    elif (reshaped := _reshaped(spec, role, new)) is not None:
        yield reshaped
    elif dialect.split_gate and _has_gate_and_up(spec, role):
        yield from _split(role, new)
    elif spec.transposed and len(new.shape) == 2 and role.layer is not None:
        yield new.part(role.tensor(role.name, new.kind), new.shape[::-1], 0, new.num_rows, transposed=True)
    else:
        plus_one = dialect.plus_one and new.kind == ".weight" and role.name.endswith("norm")
        name = role.tensor(role.name, new.kind)
        yield new.part(name, new.shape, 0, new.num_rows, heads=heads, change=PLUS_ONE if plus_one else None)


def _reshaped(spec: DecoderSpec, role: TensorRole, new: _New) -> Part | None:
    """Returns the place of a tensor that has other dimensions in the file."""
    name = role.tensor(role.name, new.kind)
    if role.name == "ffn_gate_inp_shexp" or (role.name == CORRECTION and len(new.shape) == 2):
        return new.part(name, new.shape[1:], 0, 1)
    if role.name in ("shortconv.conv", "ssm_conv1d") and len(new.shape) == 3:
        return new.part(name, (new.shape[0], new.shape[2]), 0, new.num_rows)
    if role.name in (DECAY, SKIP, STATE_NORM):  # a row for each head, or for each group of them
        mamba = next(state for state in spec.states if isinstance(state, MambaSpec))
        num_rows = mamba.num_groups if role.name == STATE_NORM else mamba.num_heads
        return new.part(name, (num_rows, new.num_rows // num_rows), 0, 1, change=MINUS_EXP if role.name == DECAY else None)
    return None


def _has_gate_and_up(spec: DecoderSpec, role: TensorRole) -> bool:
    """Returns whether a checkpoint's tensor has the gate of an MLP and its up."""
    names = spec.names
    if role.name == "ffn_up":
        return names.gate == names.up
    shared = names.shared_projections
    return role.name == "ffn_up_shexp" and shared is not None and shared[0] == shared[1]


def _split(role: TensorRole, new: _New) -> Iterator[Part]:
    """Yields the places of an MLP's gate and up, which a checkpoint has in one tensor."""
    half = new.num_rows // 2
    for start, name in ((0, role.name.replace("up", "gate")), (half, role.name)):
        yield new.part(role.tensor(name, new.kind), (half, *new.shape[1:]), start, half)


def _stacked(role: TensorRole, new: _New, stored: Mapping[str, Any]) -> Part:
    """Returns the place of one of several tensors that the file has in one, or in one with others."""
    fused = role.tensor(GATE_UPS, new.kind)
    count = 1 if len(new.shape) == 1 else new.num_rows
    assert role.count is not None
    if role.name in (GATES, UPS) and fused in stored:
        shape = (role.count, 2 * count, *new.shape[1:])
        return new.part(fused, shape, 0, count, first=(2 * role.index + (role.name == UPS)) * count)
    return new.part(role.tensor(role.name, new.kind), (role.count, *new.shape), 0, count, first=role.index * count)


def _of_fused(spec: DecoderSpec, role: TensorRole, new: _New, name: str, heads: int | None) -> Part:
    """Returns the place of queries, keys or values in a tensor that has all three, one after the other."""
    counts = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    first = sum(counts[: (QUERY, KEY, VALUE).index(role.name)])
    return new.part(name, (sum(counts), *new.shape[1:]), 0, new.num_rows, first=first, heads=heads)


def _grouped(spec: DecoderSpec, dialect: Dialect, role: TensorRole, new: _New) -> Iterator[Part]:
    """Yields the queries of each key-value head, then its key, then its value, as a checkpoint has them.

    In the file all queries are first, then all keys, then all values; or they are tensors of their own.
    """
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    counts, names = (group * dim, dim, dim), (QUERY, KEY, VALUE)
    before = (0, spec.num_heads * dim, (spec.num_heads + spec.num_kv_heads) * dim)
    start = 0
    for head in range(spec.num_kv_heads):
        for name, count, skip in zip(names, counts, before, strict=True):
            heads = count // dim if dialect.permuted and name != VALUE else None
            if dialect.split_qkv:
                shape = (count * spec.num_kv_heads, *new.shape[1:])
                yield new.part(role.tensor(name, new.kind), shape, start, count, first=head * count, heads=heads)
            else:
                yield new.part(role.tensor(FUSED, new.kind), new.shape, start, count, first=skip + head * count, heads=heads)
            start += count


def _latent(spec: DecoderSpec, role: TensorRole, new: _New) -> Iterator[Part]:
    """Yields, for each head, the weights of its keys, which the file has transposed, and of its values."""
    latent = spec.latent
    assert latent is not None
    keys, values = latent.plain_dim, latent.value_dim
    k_shape, v_shape = (spec.num_heads, latent.rank, keys), (spec.num_heads, values, latent.rank)
    k_part = partial(new.part, role.tensor("attn_k_b", new.kind), k_shape, transposed=True)
    v_part = partial(new.part, role.tensor("attn_v_b", new.kind), v_shape)
    for head in range(spec.num_heads):
        start = head * (keys + values)
        yield k_part(start, keys, first=head * latent.rank)
        yield v_part(start + keys, values, first=head * values)


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A tensor of a file, and what it consists of, in the file's order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)


def by_stored(parts: list[Part]) -> list[StoredPlace]:
    """Returns the tensors of a file that is written, in the order of their first parts."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    return [
        StoredPlace(name, members[0].stored_shape, tuple(sorted(members, key=lambda part: part.first)))
        for name, members in found.items()
    ]


def by_source(parts: list[Part]) -> dict[str, tuple[Part, ...]]:
    """Returns the parts of each tensor of a checkpoint, in its order."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return {source: tuple(sorted(members, key=lambda part: part.start)) for source, members in found.items()}
