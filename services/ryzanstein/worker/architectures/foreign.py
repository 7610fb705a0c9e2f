"""Options of config.json that no architecture here supports: refused for all, with advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ryzanstein.worker.refusal import CheckpointError, excerpt

QUANT_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitnet", "mxfp4")
"""The stored quantization that is read, by quant_method."""
_SERVED_AS = f"only {', '.join(QUANT_METHODS)} are read: save the model dequantized, or take the original checkpoint"


def refuse_foreign(config: Mapping[str, Any], *, unequal: bool) -> None:
    """Raises CheckpointError for unknown stored quantization, non-causal attention and, if they may not be, unequal layers."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if quantization and method not in QUANT_METHODS:
        raise CheckpointError(
            f"config.json: quantization_config is not supported (quant_method {excerpt(method)}): {_SERVED_AS}"
        )
    if not config.get("is_causal", True):
        raise CheckpointError("config.json: is_causal false is not supported: attention must be causal")
    if config.get("per_layer_config") and not unequal:
        raise CheckpointError("config.json: per_layer_config is not supported: all layers must have the same sizes")


def refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a model that is quantized already, where only floats can be used.

    `where` names the config.json in the message.
    """
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{where}: the model is quantized already (quantization_config has quant_method {excerpt(method)}), and only a "
            "model of floats is read here: take the original checkpoint"
        )


def refuse_nested(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a multimodal model: its decoder is described one level deeper."""
    nested = config.get("text_config")
    if nested is None or config.get("model_type") in known:
        return
    inner = nested.get("model_type") if isinstance(nested, dict) else None
    raise CheckpointError(
        f"config.json: model_type {excerpt(config.get('model_type'))} with a text_config is a multimodal model, and only text "
        f"is served: save its language model by itself (text_config has model_type {excerpt(inner)})"
    )
