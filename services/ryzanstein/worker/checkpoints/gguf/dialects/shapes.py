"""What some say besides: Falcon its generation, MPT ALiBi, GPT-NeoX parallel halves, Command R7B and EXAONE 4 a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value

_ALIBI = 8.0


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


def window_metadata(spec: DecoderSpec) -> dict[str, Value]:
    """Returns the window that some layers have."""
    window = next((window for window in spec.windows if window is not None), None)
    return {} if window is None else {"attention.sliding_window": window}
