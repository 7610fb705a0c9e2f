"""Reads a Hugging Face `config.json` into a DecoderSpec. What it does not know it refuses by name: nothing is ignored that
could change a logit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.model.architectures.spec import (
    Activation,
    DecoderSpec,
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    WeightNames,
)
from ryzanstein.worker.model.refusal import CheckpointError

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table: `model_type` as config.json has it and the checkpoint's names."""

    model_type: str
    names: WeightNames

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """The decoder that `config` describes. Raises CheckpointError naming the key that is missing, wrong or unknown."""
        values = _Values(config)
        if config.get("quantization_config"):
            raise CheckpointError("config.json: quantization_config is not known")
        hidden_size, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
        return DecoderSpec(
            model_type=self.model_type,
            names=self.names,
            num_layers=values.count("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_divisor(values.count("num_key_value_heads", num_heads), num_heads),
            head_dim=values.count("head_dim", hidden_size // num_heads),
            intermediate_size=values.count("intermediate_size"),
            vocab_size=values.count("vocab_size"),
            context_length=values.count("max_position_embeddings"),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            rotary=_rotary(values),
            activation=_activation(config.get("hidden_act", "silu")),
            attention_bias=values.flag("attention_bias"),
            mlp_bias=values.flag("mlp_bias"),
            tied_head=values.flag("tie_word_embeddings"),
        )


@dataclass(frozen=True, slots=True)
class _Values:
    """Typed access to an untyped mapping; `where` leads to it from the top of config.json. Null counts as absent."""

    config: Mapping[str, Any]
    where: str = ""

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {self.where}{key} must be a whole number above 0, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"config.json: {self.where}{key} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self.where}{key} must be true or false, got {value!r}")
        return value

    def table(self, key: str) -> _Values:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {self.where}{key} must be an object, got {value!r}")
        return _Values(value, f"{self.where}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {self.where}{key} is missing")
        return value


def _divisor(num_kv_heads: int, num_heads: int) -> int:
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config.json: {num_heads} attention heads do not divide over {num_kv_heads} key-value heads")
    return num_kv_heads


def _activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: hidden_act {name!r} is not known, only {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rotary(values: _Values) -> RotarySpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    table = values.table("rope_parameters" if "rope_parameters" in values.config else "rope_scaling")
    theta = table.number("rope_theta", values.number("rope_theta", 10000.0))
    kind = table.config.get("rope_type", table.config.get("type", "default"))
    if kind == "default":
        return RotarySpec(theta)
    if kind == "linear":
        return RotarySpec(theta, LinearScaling(table.number("factor")))
    if kind == "llama3":
        return RotarySpec(theta, _llama3(table))
    raise CheckpointError(f"config.json: {table.where}rope_type {kind!r} is not known, only default, linear and llama3")


def _llama3(table: _Values) -> Llama3Scaling:
    return Llama3Scaling(
        factor=table.number("factor"),
        low_freq_factor=table.number("low_freq_factor"),
        high_freq_factor=table.number("high_freq_factor"),
        original_context=table.count("original_max_position_embeddings"),
    )
