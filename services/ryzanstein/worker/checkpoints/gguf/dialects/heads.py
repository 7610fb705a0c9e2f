"""Heads and their positions: rotated as a whole or in part, or not at all.

Of Gemma's windows, bases of rotation and scale of scores a file says little or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ryzanstein.worker.architectures.spec import DecoderSpec, LinearScaling, Llama3Scaling, RotarySpec, YarnScaling
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.checkpoints.gguf.rope_factors import scaling_of
from ryzanstein.worker.refusal import CheckpointError, excerpt

_KEY_VALUE_HEADS, _GROWTH = "attention.head_count_kv", "attention.temperature_scale"


class HeadParameters(Protocol):
    """What a dialect says of its heads: their sizes, and how they rotate."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns keys of config.json under Llama's names; `config` has the width and the number of heads."""
        ...

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        """Returns metadata of the file, without the architecture's name before them."""
        ...


@dataclass(frozen=True, slots=True)
class WholeHeads:
    """Heads that rotate as a whole. `square`: their size is the width over their number, and config.json need not say it."""

    square: bool = False

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found = _heads(reader, config)
        rotated = reader.count("rope.dimension_count", found["head_dim"])
        if rotated != found["head_dim"]:
            reader.refuse("rope.dimension_count", f"is {rotated}, but a head has {found['head_dim']} numbers")
        if self.square:
            _refuse_other_size(reader, config, found.pop("head_dim"))
        return {**found, **read_rotation(reader, rotated)}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return {**_sizes(spec), **rotation_metadata(spec)}


@dataclass(frozen=True, slots=True)
class PartlyRotatedHeads:
    """Heads of which the first numbers rotate. `square`: see `WholeHeads`."""

    square: bool = True

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found = _heads(reader, config)
        head_dim = found["head_dim"]
        if self.square:
            _refuse_other_size(reader, config, found.pop("head_dim"))
        rotated = reader.count("rope.dimension_count", head_dim)
        if rotated > head_dim:
            reader.refuse("rope.dimension_count", f"is {rotated}, but a head has {head_dim} numbers")
        factor = rotated / head_dim
        if int(head_dim * factor) < rotated:  # transformers rounds down
            factor = math.nextafter(factor, 1)
        return {**found, "partial_rotary_factor": factor, **read_rotation(reader, rotated)}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return {**_sizes(spec), **rotation_metadata(spec)}


@dataclass(frozen=True, slots=True)
class PlainHeads:
    """Heads that do not rotate."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found = _heads(reader, config)
        _refuse_other_size(reader, config, found["head_dim"])
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return _sizes(spec)


@dataclass(frozen=True, slots=True)
class GrowingHeads:
    """Whole heads of Ministral 3, whose queries grow with their position. A rotation by YaRN keeps their length otherwise."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found = WholeHeads().read(reader, config)
        if "rope_scaling" not in found:
            reader.refuse("rope.scaling.type", "is missing, only yarn is supported")
        found["rope_scaling"] |= {"llama_4_scaling_beta": reader.number(_GROWTH), "mscale": 1.0, "mscale_all_dim": 1.0}
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        growth = spec.rotaries[0].growth
        assert growth is not None
        return {**WholeHeads().write(spec, config), _GROWTH: float(growth.rate), "rope.scaling.yarn_log_multiplier": 1.0}


@dataclass(frozen=True, slots=True)
class UntruncatedHeads:
    """Whole heads of gpt-oss. YaRN's ramp begins and ends at dimensions that are no whole numbers."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        found = WholeHeads().read(reader, config)
        scaling = found.pop("rope_scaling", {"rope_type": "default"})
        return {**found, "rope_parameters": {"rope_theta": found["rope_theta"], **scaling, "truncate": False}}

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        return WholeHeads().write(spec, config)


@dataclass(frozen=True, slots=True)
class ConvolvedHeads:
    """Heads of LFM2, whole and square, with a count of key-value heads for each layer: 0 where there is a short convolution."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        stored = reader.facts.metadata.get(f"{reader.name}.{_KEY_VALUE_HEADS}")
        counts = stored.tolist() if isinstance(stored, np.ndarray) else [stored] * num_layers
        known = {count for count in counts if isinstance(count, int) and count > 0}
        if len(counts) != num_layers or len(known) != 1 or not {*counts} <= {0, *known}:
            reader.refuse(_KEY_VALUE_HEADS, f"must be one count, or 0, for each of {num_layers} layers, got {excerpt(counts)}")
        return {
            "num_key_value_heads": known.pop(),
            "layer_types": ["full_attention" if count else "conv" for count in counts],
            "conv_L_cache": reader.count("shortconv.l_cache"),
            **read_rotation(reader, max(1, config["hidden_size"] // heads)),
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        convolutions = [layer.convolution for layer in spec.layers]
        lengths = [convolution.length for convolution in convolutions if convolution is not None]
        if not lengths:
            raise CheckpointError("config.json: layer_types without a convolution cannot be written as GGUF")
        counts = [spec.num_kv_heads if convolution is None else 0 for convolution in convolutions]
        return {
            _KEY_VALUE_HEADS: np.array(counts, np.int32),
            "shortconv.l_cache": lengths[0],
            **rotation_metadata(spec),
        }


def read_rotation(reader: MetadataReader, rotated: int) -> dict[str, Any]:
    """Returns `rope_theta`, and `rope_scaling` if positions are scaled; `rotated` numbers of a head rotate."""
    theta = reader.number("rope.freq_base", 1e4)
    if reader.facts.rope_factors is not None:
        return {"rope_theta": theta, "rope_scaling": _llama3(reader, rotated, theta)}
    kind = reader.word("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_theta": theta}
    if kind not in ("linear", "yarn"):
        reader.refuse("rope.scaling.type", f"{excerpt(kind)} is not supported, only none, linear and yarn")
    table: dict[str, Any] = {"rope_type": kind, "factor": reader.number("rope.scaling.factor")}
    if kind == "yarn":
        table["original_max_position_embeddings"] = reader.count("rope.scaling.original_context_length")
    return {"rope_theta": theta, "rope_scaling": table}


def rotation_metadata(spec: DecoderSpec) -> dict[str, Value]:
    """Returns what a file says of a decoder's rotation. Raises CheckpointError for one that it has no name for."""
    if not spec.rotaries:
        raise CheckpointError("config.json: alibi cannot be written as GGUF for this architecture, only rotary positions")
    rotary: RotarySpec = spec.rotaries[0]
    found: dict[str, Value] = {"rope.dimension_count": rotary.dim, "rope.freq_base": float(rotary.theta)}
    match rotary.scaling:
        case LinearScaling(factor):
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnScaling():
            found |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rotary.scaling.factor),
                "rope.scaling.original_context_length": rotary.scaling.original_context,
            }
        case None | Llama3Scaling():
            pass
        case _:
            raise CheckpointError(f"config.json: {type(rotary.scaling).__name__} of positions cannot be written as GGUF")
    return found


def _heads(reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    keys = reader.count("attention.key_length", max(1, config["hidden_size"] // heads))
    values = reader.count("attention.value_length", keys)
    if values != keys:
        reader.refuse("attention.value_length", f"is {values}, but attention.key_length is {keys}")
    return {"num_key_value_heads": reader.count(_KEY_VALUE_HEADS, heads), "head_dim": keys}


def _refuse_other_size(reader: MetadataReader, config: Mapping[str, Any], head_dim: int) -> None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if head_dim * heads != width:
        reader.refuse("attention.key_length", f"is {head_dim}, but {heads} heads have {width} numbers together")


def _sizes(spec: DecoderSpec) -> dict[str, Value]:
    return {
        _KEY_VALUE_HEADS: spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
    }


def _llama3(reader: MetadataReader, dim: int, theta: float) -> dict[str, Any]:
    factors = reader.facts.rope_factors
    scaling = None if factors is None else scaling_of(factors, theta, dim)
    if scaling is None:
        raise CheckpointError(f"{reader.facts.file}: tensor rope_freqs.weight does not have the factors of Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


_THETA, _LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True, slots=True)
class GemmaWindows:
    """One layer in `period` has no window. A file may lack the window only if `usual` is not 0.

    Scores of the largest model, which has `largest` layers, are scaled by its width, not by a
    head's. With `bases`, layers with windows rotate by a base of their own.
    """

    period: int
    usual: int
    largest: int
    bases: bool = False

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what llama.cpp assumes where the file says nothing."""
        num_layers, period = config["num_hidden_layers"], self._period(reader)
        by_width = config["hidden_size"] // config["num_attention_heads"]
        found: dict[str, Any] = {
            "query_pre_attn_scalar": by_width if num_layers == self.largest else config["head_dim"],
            "sliding_window": reader.count("attention.sliding_window", self.usual),
            "layer_types": [
                "full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(num_layers)
            ],
        }
        if self.bases:
            found["rope_theta"] = reader.number("rope.freq_base", _THETA)
            found["rope_local_base_freq"] = reader.number("rope.freq_base_swa", _LOCAL_THETA)
        if not found["sliding_window"]:
            reader.refuse("attention.sliding_window", "is missing")
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        window = next((window for window in spec.windows if window is not None), None)
        return {} if window is None else {"attention.sliding_window": window}

    def _period(self, reader: MetadataReader) -> int:
        stored = reader.facts.metadata.get(f"{reader.name}.attention.sliding_window_pattern", self.period)
        if isinstance(stored, bool) or not isinstance(stored, int) or stored < 1:
            reader.refuse("attention.sliding_window_pattern", f"{excerpt(stored)} is not supported, only a number of layers")
        return int(stored)
