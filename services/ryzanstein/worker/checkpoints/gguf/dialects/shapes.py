"""What some say besides.

Falcon says its generation, MPT ALiBi, GPT-NeoX parallel halves, Command R7B and EXAONE 4 a window; Granite 4, Falcon H1 and
Nemotron H the sizes of Mamba 2, and which layers have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ryzanstein.worker.architectures.mixers import MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.experts import Experts, experts_of
from ryzanstein.worker.checkpoints.gguf.dialects.heads import read_rotation, rotation_metadata
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, excerpt

_ALIBI = 8.0
_KEY_VALUE_HEADS = "attention.head_count_kv"


@dataclass(frozen=True, slots=True)
class FalconGeneration:
    """Which generation of Falcon it is: told by the number of key-value heads and of norms."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        two_norms = reader.has_tensor("blk.0.attn_norm_2.weight")
        single = config["num_key_value_heads"] == 1 and not two_norms
        found: dict[str, Any] = {"multi_query": single, "new_decoder_architecture": not single}
        return found if single else {**found, "num_ln_in_parallel_attn": 2 if two_norms else 1}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return {}


@dataclass(frozen=True, slots=True)
class MptAttention:
    """ALiBi, and the bound of queries, keys and values."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        slope = reader.number("attention.max_alibi_bias", 0.0)
        if slope != _ALIBI:
            reader.refuse("attention.max_alibi_bias", f"is {slope:g}, only {_ALIBI:g} is supported")
        bound = reader.number("attention.clamp_kqv", 0.0)
        return {"attn_config": {"alibi": True, "clip_qkv": bound or None}}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        bound: dict[str, Value] = {} if spec.qkv_clip is None else {"attention.clamp_kqv": float(spec.qkv_clip)}
        return {"attention.max_alibi_bias": _ALIBI, **bound}


@dataclass(frozen=True, slots=True)
class ParallelHalves:
    """Whether the halves of a layer are parallel, which GPT-NeoX's file says."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_parallel_residual": reader.flag("use_parallel_residual", default=True)}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return {"use_parallel_residual": spec.parallel}


@dataclass(frozen=True, slots=True)
class AlternatingWindows:
    """A window in every other layer, from the first one on. llama.cpp knows the pattern by itself."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(config["num_hidden_layers"])]
        return {"sliding_window": reader.count("attention.sliding_window"), "layer_types": kinds}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return window_metadata(spec)


@dataclass(frozen=True, slots=True)
class PatternWindows:
    """Three layers with a window, then one without; only in models of so many `layers`, if it is not 0.

    A file has the window; llama.cpp knows the pattern, and which models have it, by itself.
    """

    layers: int = 0

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = config["num_hidden_layers"]
        if self.layers and num_layers != self.layers:
            return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
        kinds = ["full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(num_layers)]
        return {"sliding_window": reader.count("attention.sliding_window"), "layer_types": kinds}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return window_metadata(spec)


@dataclass(frozen=True, slots=True)
class MixedHeads:
    """Heads of models whose layers are of several kinds: there are no key-value heads where there is no attention.

    Layers without heads have Mamba 2, or only what is `wide` if their width says so. `turned`: every layer has an MLP, and
    the file says whether positions count (Granite 4).
    """

    turned: bool = False
    wide: str = "mlp"

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = config["num_hidden_layers"]
        heads, widths = (reader.by_layer(key, num_layers) for key in (_KEY_VALUE_HEADS, "feed_forward_length"))
        if len({*heads} - {0}) != 1:
            reader.refuse(_KEY_VALUE_HEADS, f"must be one count, or 0, for each layer, got {excerpt(heads)}")
        without = [self.wide if width and not self.turned else "linear_attention" for width in widths]
        kinds = ["full_attention" if count else kind for count, kind in zip(heads, without, strict=True)]
        dim = reader.count("attention.key_length", max(1, config["hidden_size"] // config["num_attention_heads"]))
        found = {"num_key_value_heads": max(heads), "head_dim": dim, "layer_types": kinds}
        if not self.turned:
            return {**found, "layers_block_type": kinds, "intermediate_size": max(widths) or 1}
        turns = reader.flag("rope.scaling.finetuned", default=True)
        return {**found, **read_rotation(reader, dim), "position_embedding_type": "rope" if turns else "nope"}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        found: dict[str, Value] = {
            _KEY_VALUE_HEADS: np.array([spec.num_kv_heads if layer.attention else 0 for layer in spec.layers], np.int32),
            "attention.key_length": spec.head_dim,
            "attention.value_length": spec.head_dim,
        }
        if not self.turned:
            widths = [
                (layer.experts.width if layer.experts else spec.intermediate_size) if layer.mlp else 0 for layer in spec.layers
            ]
            eps = float(spec.norm.eps)  # of the same norms, which llama.cpp wants under both names
            return {**found, "feed_forward_length": np.array(widths, np.int32), "attention.layer_norm_epsilon": eps}
        turns = any(layer.rotary is not None for layer in spec.layers)
        return {**found, **rotation_metadata(spec), "rope.scaling.finetuned": turns}


@dataclass(frozen=True, slots=True)
class StateSpaces:
    """The sizes of Mamba 2, under config.json's names for them.

    `width` is the key of what all heads put out, unless it is as often the model's width as `mamba_expand` says.
    """

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    rows: str = "mamba_d_state"
    length: str = "mamba_d_conv"
    bias: str = "mamba_conv_bias"
    head_dim: str = "mamba_d_head"
    width: str = ""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        width, num_heads = reader.count("ssm.inner_size"), reader.count("ssm.time_step_rank")
        if width % num_heads:
            reader.refuse(
                "ssm.time_step_rank", f"is {num_heads}, over which the {width} numbers of ssm.inner_size do not divide"
            )
        found = {
            self.heads: num_heads,
            self.groups: reader.count("ssm.group_count"),
            self.rows: reader.count("ssm.state_size"),
            self.length: reader.count("ssm.conv_kernel"),
            self.head_dim: width // num_heads,
            self.bias: any(name.endswith("ssm_conv1d.bias") for name in reader.facts.shapes),
        }
        return {**found, self.width or "mamba_expand": width if self.width else max(1, width // config["hidden_size"])}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        mamba = next((state for state in spec.states if isinstance(state, MambaSpec)), None)
        if mamba is None:
            raise CheckpointError("config.json: layer_types without Mamba 2 cannot be written as GGUF")
        return {
            "ssm.conv_kernel": mamba.length,
            "ssm.inner_size": mamba.width,
            "ssm.state_size": mamba.state_dim,
            "ssm.time_step_rank": mamba.num_heads,
            "ssm.group_count": mamba.num_groups,
        }


@dataclass(frozen=True, slots=True)
class GraniteExperts:
    """The experts of Granite 4, which may be none: then its only MLP is the one that is else beside them."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        shared, width = "expert_shared_feed_forward_length", config["intermediate_size"]
        if not reader.count("expert_count", 0):
            return {"num_experts": 0, "shared_intermediate_size": reader.count(shared, width)}
        return {**Experts().read(reader, config), "shared_intermediate_size": reader.count(shared)}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        if not any(layer.experts for layer in spec.layers):
            return {"expert_shared_feed_forward_length": spec.intermediate_size}
        moe = experts_of(spec)
        return {**Experts().write(spec, config), "expert_shared_feed_forward_length": moe.shared_width or 0}


def window_metadata(spec: DecoderSpec) -> dict[str, Value]:
    """Returns the window that some layers have."""
    window = next((window for window in spec.windows if window is not None), None)
    return {} if window is None else {"attention.sliding_window": window}
