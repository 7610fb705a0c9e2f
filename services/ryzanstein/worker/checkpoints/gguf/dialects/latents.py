"""Hyper-parameters of DeepSeek: attention over latents, and how experts are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.architectures.registry import values_of
from ryzanstein.worker.architectures.rotary.config import rotary_table
from ryzanstein.worker.architectures.spec import DecoderSpec, YarnScaling
from ryzanstein.worker.checkpoints.gguf.dialects.experts import experts_of
from ryzanstein.worker.checkpoints.gguf.dialects.heads import read_rotation, rotation_metadata
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader, shortest
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError

SOFTMAX, SIGMOID = 1, 2
_RATED = 2
"""llama.cpp rates a group by its two best experts."""
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads whose keys and values come from a latent. In a file they are one head, as wide as a cache slot.

    Files that are older have the sizes of the heads instead, and no keys that end in `_mla`.
    """

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        ending = "_mla" if "attention.key_length_mla" in reader else ""
        keys, values = reader.count(f"attention.key_length{ending}"), reader.count(f"attention.value_length{ending}")
        rotated = reader.count("rope.dimension_count")
        if rotated >= keys:
            reader.refuse("rope.dimension_count", f"is {rotated}, but a head has {keys} numbers")
        rotation = read_rotation(reader, rotated)
        if "rope_scaling" in rotation:
            rotation["rope_scaling"] |= _growth(reader)
        return {
            "num_key_value_heads": config["num_attention_heads"],
            "head_dim": rotated,
            "qk_nope_head_dim": keys - rotated,
            "v_head_dim": values,
            "kv_lora_rank": reader.count("attention.kv_lora_rank"),
            "q_lora_rank": reader.count("attention.q_lora_rank", 0) or None,
            **rotation,
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        latent = spec.latent
        if latent is None or latent.norm.eps != spec.norm.eps:
            eps = None if latent is None else latent.norm.eps
            raise CheckpointError(f"config.json: rms_norm_eps {spec.norm.eps:g} cannot be written as GGUF, only {eps}")
        found: dict[str, Value] = {
            "attention.head_count_kv": 1,
            "attention.key_length": spec.head_dim,
            "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.plain_dim + latent.rotary_dim,
            "attention.value_length_mla": latent.value_dim,
            "attention.kv_lora_rank": latent.rank,
            "attention.q_lora_rank": latent.query_rank or 0,
            **rotation_metadata(spec),
        }
        if isinstance(spec.rotaries[0].scaling, YarnScaling):
            magnitude = rotary_table(values_of(config)).config.get("mscale_all_dim") or 0.0
            found[_LOG_MULTIPLIER] = 0.1 * magnitude
        return found


def _growth(reader: MetadataReader) -> dict[str, Any]:
    """Returns by what scores grow with YaRN: a rotation of DeepSeek keeps its length otherwise."""
    multiplier = reader.number(_LOG_MULTIPLIER, 0.0)
    if multiplier == 0:
        return {"attention_factor": 1.0}
    magnitude = shortest(10 * multiplier)
    return {"mscale": magnitude, "mscale_all_dim": magnitude}


@dataclass(frozen=True, slots=True)
class DeepseekExperts:
    """Dense first layers, the width of the shared expert, and the rule that chooses experts."""

    gating: int

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "first_k_dense_replace": reader.count("leading_dense_block_count", 0),
            "n_shared_experts": reader.count("expert_shared_count"),
            "routed_scaling_factor": reader.number("expert_weights_scale", 1.0),
            "norm_topk_prob": reader.flag("expert_weights_norm", default=False),
        }
        groups, chosen = reader.count("expert_group_count", 1), reader.count("expert_group_used_count", 1)
        if self.gating == SIGMOID:
            return {**found, "n_group": groups, "topk_group": chosen, "num_mtp_layers": 0}
        if groups == 1:
            return {**found, "topk_method": "greedy"}
        return {**found, "topk_method": "group_limited_greedy", "n_group": groups, "topk_group": chosen}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        moe = experts_of(spec)
        found: dict[str, Value] = {
            "leading_dense_block_count": sum(layer.experts is None for layer in spec.layers),
            "expert_shared_count": (moe.shared_width or 0) // moe.width,
            "expert_weights_scale": float(moe.routing.scale),
            "expert_weights_norm": moe.routing.normalized,
            "expert_gating_func": self.gating,
        }
        groups = moe.routing.groups
        if groups is None or groups.num_groups == 1:
            return found
        if groups.num_rated != _RATED or groups.top_k == groups.num_groups:
            rated = f"{groups.top_k} of {groups.num_groups} groups, rated by {groups.num_rated} experts each"
            what = f"less than all groups, rated by {_RATED} experts each"
            raise CheckpointError(f"config.json: topk_group cannot be written as GGUF: {rated}, llama.cpp has {what}")
        return {**found, "expert_group_count": groups.num_groups, "expert_group_used_count": groups.top_k}
