"""Hyper-parameters: the metadata of a GGUF file as config.json, and back.

What a file does not say is what llama.cpp assumes for the architecture. A model that differs from
it cannot be written: `metadata_of` reads back what it says and compares the decoders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import numpy as np

from ryzanstein.worker.model.architectures.registry import spec_of
from ryzanstein.worker.model.architectures.spec import DecoderSpec, LinearScaling, Llama3Scaling, RotarySpec, YarnScaling
from ryzanstein.worker.model.gguf.dialects import GEMMA2, GEMMA3, Dialect
from ryzanstein.worker.model.gguf.header import Value
from ryzanstein.worker.model.gguf.rope_factors import scaling_of
from ryzanstein.worker.model.gguf.small_blocks import Numbers
from ryzanstein.worker.model.refusal import CheckpointError, shown

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_GEMMA_THETA, _LOCAL_THETA = 1e6, 1e4
_WINDOWS_OF_6 = 6
"""Every sixth layer of Gemma 3 has no window, every second one of Gemma 2."""
_LARGEST_GEMMA = {GEMMA2.name: 46, GEMMA3.name: 62}
"""The number of layers of the 27B models: their scores are scaled by the width, not by a head's."""


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a file says of its decoder: metadata, shapes of its tensors, and Llama 3's factors if it has them.

    `file` is its name for messages.
    """

    file: str
    metadata: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: Numbers | None = None


def config_of(facts: GgufFacts, dialect: Dialect) -> dict[str, Any]:
    """Returns the config.json of a file's decoder. Raises CheckpointError, which names the key."""
    return _Reader(facts, dialect).config()


def metadata_of(config: Mapping[str, Any], facts: GgufFacts, dialect: Dialect) -> dict[str, Value]:
    """Returns a file's metadata for the decoder of config.json; `facts` lacks only them.

    Raises CheckpointError for a decoder that differs from what llama.cpp would make of the file.
    """
    spec = spec_of(config)
    metadata = _metadata(spec, config, dialect)
    understood = spec_of(_Reader(replace(facts, metadata=metadata), dialect).config())
    _refuse_differences(facts.file, spec, understood, dialect)
    return metadata


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one file's metadata."""

    facts: GgufFacts
    dialect: Dialect

    def config(self) -> dict[str, Any]:
        dialect, heads = self.dialect, self._count("attention.head_count")
        width, head_dim = self._count("embedding_length"), self._head_dim(heads)
        epsilon = "layer_norm_epsilon" if dialect.layer_norm else "layer_norm_rms_epsilon"
        config: dict[str, Any] = {
            "architectures": [dialect.class_name],
            "model_type": dialect.model_type,
            "hidden_size": width,
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._count("feed_forward_length"),
            "vocab_size": self._vocabulary(width),
            "max_position_embeddings": self._count("context_length"),
            _EPSILON_KEYS.get(dialect.model_type, "rms_norm_eps"): self._number(f"attention.{epsilon}"),
            "rope_theta": self._number("rope.freq_base", 1e4),
            "tie_word_embeddings": _HEAD not in self.facts.shapes,
            **dialect.fixed,
        }
        config |= {key: self._scalar(key, theirs) for key, theirs in dialect.scalars.items()}
        config |= {flag: tensor in self.facts.shapes for flag, tensor in dialect.biases.items()}
        config |= self._scaling(head_dim, config["rope_theta"])
        if dialect in (GEMMA2, GEMMA3):
            config |= self._gemma(config)
        return config

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what llama.cpp assumes for Gemma 2 and 3, and no file says."""
        third = self.dialect is GEMMA3
        largest = config["num_hidden_layers"] == _LARGEST_GEMMA[self.dialect.name]
        by_width = config["hidden_size"] // config["num_attention_heads"]
        period = self._period(_WINDOWS_OF_6 if third else 2)
        kinds = [
            "full_attention" if (index + 1) % period == 0 else "sliding_attention"
            for index in range(config["num_hidden_layers"])
        ]
        found: dict[str, Any] = {
            "query_pre_attn_scalar": by_width if largest else config["head_dim"],
            "sliding_window": self._count("attention.sliding_window", 0 if third else 4096),
            "layer_types": kinds,
        }
        if third:
            found["rope_theta"] = self._number("rope.freq_base", _GEMMA_THETA)
            found["rope_local_base_freq"] = self._number("rope.freq_base_swa", _LOCAL_THETA)
        if not found["sliding_window"]:
            self._refuse("attention.sliding_window", "is missing")
        return found

    def _period(self, usual: int) -> int:
        stored = self.facts.metadata.get(f"{self.dialect.name}.attention.sliding_window_pattern", usual)
        if isinstance(stored, bool) or not isinstance(stored, int) or stored < 1:
            self._refuse("attention.sliding_window_pattern", f"{shown(stored)} is not supported, only a number of layers")
        return int(stored)

    def _head_dim(self, heads: int) -> int:
        width = self._count("embedding_length")
        keys = self._count("attention.key_length", max(1, width // heads))
        values = self._count("attention.value_length", keys)
        rotated = self._count("rope.dimension_count", keys)
        if values != keys:
            self._refuse("attention.value_length", f"is {values}, but attention.key_length is {keys}")
        if rotated != keys:
            self._refuse("rope.dimension_count", f"is {rotated}, but a head has {keys} numbers")
        return keys

    def _vocabulary(self, width: int) -> int:
        """Returns the rows of the embedding: a file's other numbers may be those of its tokens."""
        shape = self.facts.shapes.get(_EMBEDDING)
        if shape is None or len(shape) != 2 or shape[1] != width:
            what = "is missing" if shape is None else f"has shape {list(shape)}"
            raise CheckpointError(f"{self.facts.file}: tensor {_EMBEDDING} {what}, must be [vocabulary, {width}]")
        return shape[0]

    def _scaling(self, head_dim: int, theta: float) -> dict[str, Any]:
        if self.facts.rope_factors is not None:
            return {"rope_scaling": self._llama3(self.facts.rope_factors, head_dim, theta)}
        kind = self.facts.metadata.get(f"{self.dialect.name}.rope.scaling.type", "none")
        if kind == "none":
            return {}
        if kind not in ("linear", "yarn"):
            self._refuse("rope.scaling.type", f"{shown(kind)} is not supported, only none, linear and yarn")
        table: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            table["original_max_position_embeddings"] = self._count("rope.scaling.original_context_length")
        return {"rope_scaling": table}

    def _llama3(self, factors: Numbers, head_dim: int, theta: float) -> dict[str, Any]:
        scaling = scaling_of(factors, theta, head_dim)
        if scaling is None:
            raise CheckpointError(f"{self.facts.file}: tensor rope_freqs.weight does not have the factors of Llama 3's scaling")
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }

    def _scalar(self, key: str, theirs: str) -> float | None:
        if key in self.dialect.assumed and f"{self.dialect.name}.{theirs}" not in self.facts.metadata:
            return self.dialect.assumed[key]
        return self._number(theirs)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.facts.metadata.get(f"{self.dialect.name}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and np.all(value == value.flat[0]):
            value = value.flat[0].item()  # one number per layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
            self._refuse(
                key, "is missing" if value is None else f"must be a count, the same for all layers, got {shown(value)}"
            )
        return int(value)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.facts.metadata.get(f"{self.dialect.name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
            self._refuse(key, "is missing" if value is None else f"must be a finite number, got {shown(value)}")
        # The shortest decimal that is this float32: what was in config.json before it became one.
        return float(str(np.float32(value)))

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.facts.file}: {self.dialect.name}.{key} {what}")


_EPSILON_KEYS = {"cohere": "layer_norm_eps", "starcoder2": "norm_epsilon"}


def _metadata(spec: DecoderSpec, config: Mapping[str, Any], dialect: Dialect) -> dict[str, Value]:
    """Returns what a file says of a decoder; floats are rounded when they are written."""
    epsilon = "layer_norm_epsilon" if dialect.layer_norm else "layer_norm_rms_epsilon"
    found: dict[str, Value] = {
        "vocab_size": spec.vocab_size,
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        f"attention.{epsilon}": float(spec.norm.eps),
        "rope.dimension_count": spec.head_dim,
        **_rotary_metadata(spec.rotaries[0]),
    }
    window = next((window for window in spec.windows if window is not None), None)
    if dialect.windowed and window is not None:
        found["attention.sliding_window"] = window
    for key, theirs in dialect.scalars.items():
        value = _scalar(spec, key)
        if value is not None:
            found[theirs] = float(value)
    return {f"{dialect.name}.{key}": value for key, value in found.items()}


def _scalar(spec: DecoderSpec, key: str) -> float | None:
    """Returns a decoder's number under config.json's name for it."""
    return {
        "attn_logit_softcapping": spec.score_cap,
        "final_logit_softcapping": spec.logit_cap,
        "attention_multiplier": spec.layers[0].attention_scale,
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "logit_scale": spec.logit_scale,
    }[key]


def _rotary_metadata(rotary: RotarySpec) -> dict[str, Value]:
    found: dict[str, Value] = {"rope.freq_base": float(rotary.theta)}
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


def _refuse_differences(file: str, meant: DecoderSpec, understood: DecoderSpec, dialect: Dialect) -> None:
    ours, theirs = _comparable(meant), _comparable(understood)
    for key, value in ours.items():
        if theirs[key] != value:
            both = f"{dialect.name} in GGUF means {shown(theirs[key])}, the model has {shown(value)}"
            raise CheckpointError(f"{file}: {key} cannot be written: {both}")


def _comparable(spec: DecoderSpec) -> dict[str, Any]:
    """Returns a decoder's numbers as a file can have them: floats rounded, windows that never end left out."""
    layers = tuple(
        replace(layer, window=None if layer.window is not None and layer.window >= spec.context_length else layer.window)
        for layer in spec.layers
    )
    plain = {key: value for key, value in asdict(replace(spec, layers=layers)).items() if key not in ("names", "model_type")}
    rounded: dict[str, Any] = _rounded(plain)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
