"""Hyper-parameters of Gemma 4, whose layers have numbers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ryzanstein.worker.architectures.layer_heads import HeadsSpec
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec
from ryzanstein.worker.checkpoints.gguf.dialects.experts import experts_of
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.checkpoints.gguf.rope_factors import UNROTATED
from ryzanstein.worker.refusal import CheckpointError

_KV_HEADS, _PATTERN, _WIDTHS = "attention.head_count_kv", "attention.sliding_window_pattern", "feed_forward_length"
_SHARED, _PER_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
_ROUTER = "blk.0.ffn_gate_inp.weight"


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Heads of one size with a window, of another without. Of the latter some pairs do not rotate, which factors say."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = config["num_hidden_layers"]
        windowed, kv_heads = reader.flags(_PATTERN, num_layers), reader.counts(_KV_HEADS, num_layers)
        whole = [layer for layer in range(num_layers) if not windowed[layer]]
        if not whole or whole[-1] != num_layers - 1:
            reader.refuse(_PATTERN, "must end with a layer without a window")
        shared = reader.count(_SHARED, 0)
        own = [layer for layer in whole if layer < num_layers - shared]
        alternative = bool(own) and not reader.has_tensor(f"blk.{own[0]}.attn_v.weight")
        local = {kv_heads[layer] for layer in range(num_layers) if windowed[layer]} or {kv_heads[whole[0]]}
        other = {kv_heads[layer] for layer in whole}
        if len(local) > 1 or len(other) > 1 or (local != other and not alternative):
            reader.refuse(_KV_HEADS, "must be one count with a window, one without, equal where values have tensors")
        widths = reader.counts(_WIDTHS, num_layers)
        return {
            "num_key_value_heads": local.pop(),
            "num_global_key_value_heads": other.pop() if alternative else None,
            "head_dim": reader.count("attention.key_length_swa"),
            "global_head_dim": reader.count("attention.key_length"),
            "attention_k_eq_v": alternative,
            "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
            "sliding_window": reader.count("attention.sliding_window"),
            "num_kv_shared_layers": shared,
            "intermediate_size": widths[0],
            "use_double_wide_mlp": widths[-1] == 2 * widths[0],
            "hidden_size_per_layer_input": reader.count(_PER_LAYER, 0),
            "vocab_size_per_layer_input": config["vocab_size"],
            "rope_parameters": _rotations(reader),
            **_experts(reader),
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        heads = [_heads(layer) for layer in spec.layers]
        windowed = [layer.window is not None for layer in spec.layers]
        local, whole = heads[windowed.index(True) if any(windowed) else 0], heads[-1]
        found: dict[str, Value] = {
            _KV_HEADS: np.array([each.num_kv_heads for each in heads], np.int32),
            _PATTERN: np.array(windowed),
            _WIDTHS: np.array([layer.mlp_width or spec.intermediate_size for layer in spec.layers], np.int32),
            _SHARED: sum(each.shared_with is not None for each in heads),
            _PER_LAYER: 0 if spec.per_layer is None else spec.per_layer.width,
            "attention.sliding_window": next((layer.window for layer in spec.layers if layer.window is not None), 1),
        }
        for name, each, rotary in (("", whole, spec.rotaries[0]), ("_swa", local, spec.rotaries[-1])):
            found |= {f"attention.{part}_length{name}": each.head_dim for part in ("key", "value")}
            found |= {f"rope.dimension_count{name}": each.head_dim, f"rope.freq_base{name}": rotary.theta}
        if any(layer.experts is not None for layer in spec.layers):
            moe = experts_of(spec)
            found |= {"expert_count": moe.num_experts, "expert_used_count": moe.top_k, "expert_feed_forward_length": moe.width}
        return found


def _heads(layer: LayerSpec) -> HeadsSpec:
    if layer.heads is None:
        raise CheckpointError("config.json: layers cannot be written as GGUF: each must have heads of its own")
    return layer.heads


def _experts(reader: MetadataReader) -> dict[str, Any]:
    if not reader.has_tensor(_ROUTER):
        return {"enable_moe_block": False}
    found: dict[str, Any] = {"enable_moe_block": True, "moe_intermediate_size": reader.count("expert_feed_forward_length")}
    return {**found, "num_experts": reader.count("expert_count"), "num_experts_per_tok": reader.count("expert_used_count")}


def _rotations(reader: MetadataReader) -> dict[str, Any]:
    """Returns the rotations of both kinds of layers. Raises CheckpointError."""
    factors, pairs = reader.facts.rope_factors, reader.count("attention.key_length") // 2
    if factors is None or factors.shape != (pairs,):
        raise CheckpointError(f"{reader.facts.file}: tensor rope_freqs.weight must have {pairs} factors")
    rotated = int((factors < UNROTATED).sum())
    scale = float(factors[0])
    if not rotated or not (factors[:rotated] == scale).all() or not scale > 0:
        raise CheckpointError(f"{reader.facts.file}: tensor rope_freqs.weight must have one factor for all pairs that rotate")
    whole = {"rope_type": "proportional", "rope_theta": reader.number("rope.freq_base", 1e6)}
    whole |= {"partial_rotary_factor": rotated / pairs, "factor": scale}
    local = {"rope_type": "default", "rope_theta": reader.number("rope.freq_base_swa", 1e4)}
    return {"full_attention": whole, "sliding_attention": local}
