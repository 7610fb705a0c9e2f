"""Hyper-parameters of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.architectures.spec import DecoderSpec, MoeSpec
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError

MAX_EXPERTS = 2**15
"""The most experts in all layers together; the largest known models have 23,040. Each has three matrices, listed one by one."""
_DOWN = "ffn_down_exps.weight"
_SIGMOID = 2


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in all layers but the first few. Their width has a key of its own in config.json, or is the MLP's.

    `shared`: a shared expert has a width of its own.
    """

    width: str | None = None
    shared: bool = False

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        used = reader.count("expert_used_count")
        found: dict[str, Any] = {"num_experts": _checked_count(reader, config), "num_experts_per_tok": used}
        if self.width is not None:
            found[self.width] = reader.count("expert_feed_forward_length", max(1, config["intermediate_size"] // used))
        if self.shared:
            stored = reader.count("expert_shared_feed_forward_length", config["intermediate_size"])
            found["shared_expert_intermediate_size"] = stored
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        moe = experts_of(spec)
        found: dict[str, Value] = {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}
        if self.width is not None:
            found["expert_feed_forward_length"] = moe.width
        if self.shared and moe.shared_width is not None:
            found["expert_shared_feed_forward_length"] = moe.shared_width
        return found


@dataclass(frozen=True, slots=True)
class LfmExperts:
    """Dense first layers. Sigmoids rate experts, with a correction if the file has one, and the chosen add up to 1."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        num_dense = reader.count("leading_dense_block_count", 0)
        return {
            "num_dense_layers": num_dense,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": reader.has_tensor(f"blk.{num_dense}.exp_probs_b.bias"),
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return {
            "leading_dense_block_count": sum(layer.experts is None for layer in spec.layers),
            "expert_gating_func": _SIGMOID,
        }


@dataclass(frozen=True, slots=True)
class ErnieExperts:
    """Which layers have experts: one in so many, from the first that has any. And the number of shared ones."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "moe_layer_start_index": reader.count("leading_dense_block_count", 0),
            "moe_layer_end_index": -1,
            "moe_layer_interval": reader.count("interleave_moe_layer_step"),
            "moe_num_shared_experts": reader.count("expert_shared_count", 0),
            "moe_norm_min": 1e-12,
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        moe, sparse = experts_of(spec), [index for index, layer in enumerate(spec.layers) if layer.experts is not None]
        return {
            "leading_dense_block_count": sparse[0],
            "interleave_moe_layer_step": 1 if len(sparse) == 1 else sparse[1] - sparse[0],
            "expert_shared_count": (moe.shared_width or 0) // moe.width,
            "expert_shared_feed_forward_length": moe.shared_width or 0,
        }


@dataclass(frozen=True, slots=True)
class NemotronExperts:
    """Experts of Nemotron 3, which sigmoids rate with a correction, and one that sees every token."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        if (groups := reader.count("expert_group_count", 1)) != 1:
            reader.refuse(
                "expert_group_count", f"is {groups}, only 1 is supported: the file does not say how many a token uses"
            )
        return {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": reader.flag("expert_weights_norm", default=True),
            "routed_scaling_factor": reader.number("expert_weights_scale", 1.0),
            "moe_shared_expert_intermediate_size": reader.count("expert_shared_feed_forward_length"),
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        moe = experts_of(spec)
        return {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": moe.shared_width or 0,
            "expert_weights_norm": moe.routing.normalized,
            "expert_weights_scale": float(moe.routing.scale),
            "expert_group_count": 1,
        }


def experts_of(spec: DecoderSpec) -> MoeSpec:
    """Returns the experts that a decoder's layers have. Raises CheckpointError if none has."""
    found = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    if found is None:
        raise CheckpointError("config.json: no layer has experts, which cannot be written as GGUF")
    return found


def _checked_count(reader: MetadataReader, config: Mapping[str, Any]) -> int:
    """Returns the number of experts, which is also that of the matrices in each tensor of experts."""
    count, layers = reader.count("expert_count"), config["num_hidden_layers"]
    if count * layers > MAX_EXPERTS:
        reader.refuse("expert_count", f"is {count} in {layers} layers; all layers together must have at most {MAX_EXPERTS}")
    for name, shape in reader.facts.shapes.items():
        if name.endswith(_DOWN) and (len(shape) != 3 or shape[0] != count):
            raise CheckpointError(f"{reader.facts.file}: tensor {name} has shape {list(shape)}, must be of {count} experts")
    return count
