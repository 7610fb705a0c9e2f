"""A rank's rows of projections in a checkpoint: separate tensors, stacked in one, or grouped."""

from __future__ import annotations

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import HeadShare, TensorParallel
from ryzanstein.worker.model.layers.linear import Rows


def qkv_rows(spec: DecoderSpec, share: HeadShare, prefix: str) -> tuple[Rows, ...]:
    """Returns the rows of queries, keys and values of this rank's heads, then those of gates if there are any."""
    names = (prefix + spec.names.query, prefix + spec.names.key, prefix + spec.names.value)
    if spec.gated_attention:
        return _gated(names, spec, share)
    if spec.qkv_layout == "grouped":
        return _grouped(names, spec, share)
    all_heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    before = (0, spec.num_heads, spec.num_heads + spec.num_kv_heads) if spec.qkv_layout == "stacked" else (0, 0, 0)
    own = ((share.first_head, share.num_heads), *((share.first_kv_head, share.num_kv_heads),) * 2)
    query, key, value = (
        _rows(name, sum(all_heads) if spec.qkv_layout == "stacked" else total, [(skip + first, count)], spec.head_dim)
        for name, total, skip, (first, count) in zip(names, all_heads, before, own, strict=True)
    )
    return query, key, value


def _gated(names: tuple[str, str, str], spec: DecoderSpec, share: HeadShare) -> tuple[Rows, ...]:
    """Returns the rows where each head's query is stored with its gate."""
    heads = range(share.first_head, share.first_head + share.num_heads)
    total = 2 * spec.num_heads
    query, gate = (_rows(names[0], total, [(2 * head + part, 1) for head in heads], spec.head_dim) for part in range(2))
    own = [(share.first_kv_head, share.num_kv_heads)]
    key, value = (_rows(name, spec.num_kv_heads, own, spec.head_dim) for name in names[1:])
    return query, key, value, gate


def _grouped(names: tuple[str, str, str], spec: DecoderSpec, share: HeadShare) -> tuple[Rows, Rows, Rows]:
    """Returns the rows of the grouped layout: for each key-value head its queries, key and value.

    A rank may begin and end inside a group.
    """
    group = spec.num_heads // spec.num_kv_heads
    stride, total = group + 2, spec.num_kv_heads * (group + 2)
    heads = range(share.first_head, share.first_head + share.num_heads)
    kv_heads = range(share.first_kv_head, share.first_kv_head + share.num_kv_heads)
    queries = [(head // group * stride + head % group, 1) for head in heads]
    keys = [(head * stride + group, 1) for head in kv_heads]
    values = [(head * stride + group + 1, 1) for head in kv_heads]
    query, key, value = (
        _rows(name, total, pieces, spec.head_dim) for name, pieces in zip(names, (queries, keys, values), strict=True)
    )
    return query, key, value


def _rows(name: str, total: int, heads: list[tuple[int, int]], head_dim: int) -> Rows:
    return Rows(name, total * head_dim, tuple((first * head_dim, count * head_dim) for first, count in heads))


def gate_up_rows(tp: TensorParallel, gate: str, up: str, width: int) -> tuple[Rows, Rows]:
    """Returns the gate and up rows of this rank's MLP columns.

    If they share one tensor, all gates come before the first up.
    """
    start, count = tp.columns(width)
    fused = gate == up
    total, skip = (2 * width, width) if fused else (width, 0)
    return Rows(gate, total, ((start, count),)), Rows(up, total, ((skip + start, count),))
