"""gpt-oss of OpenAI: attention with sinks, windows in every other layer, experts with biases and clipped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, with_rotation
from ryzanstein.worker.architectures.spec import ClippedGate, DecoderSpec, RoutingSpec
from ryzanstein.worker.architectures.values import Values

_ROTATION: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150000.0,
}


def _gpt_oss(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds experts to all layers. Softmax over the chosen ones is softmax over all, scaled to add up to 1."""
    gate = ClippedGate(values.number("swiglu_limit", 7.0), values.number("swiglu_alpha", 1.702))
    experts = moe_spec(values, spec.intermediate_size, RoutingSpec(normalized=True, added=0.0))
    experts = replace(experts, biased=True, gate=gate)
    return replace(spec, layers=tuple(replace(layer, experts=experts) for layer in spec.layers))


GPT_OSS = Architecture(
    model_type="gpt_oss",
    title="gpt-oss",
    names=replace(LLAMA_NAMES, sinks="self_attn.sinks", router="mlp.router", expert="mlp.experts.{expert}."),
    choices=Choices(qkv_bias="attention_bias", out_bias="attention_bias", windowed=windows.even_layers),
    renamed={"num_experts": "num_local_experts"},
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
    },
    fixed={"hidden_act": "silu"},
    older=partial(with_rotation, usual=_ROTATION),
    refine=_gpt_oss,
    refined="attention with sinks; experts with biases and clipped gates; MXFP4 is kept as it is",
)
