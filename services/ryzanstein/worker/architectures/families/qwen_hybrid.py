"""Qwen 3.5 and Qwen 3 Next: a gated delta rule in three of four layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import QWEN2_MOE, moe_spec, with_sparse_layers
from ryzanstein.worker.architectures.families.llama_like import QK_NORM_NAMES
from ryzanstein.worker.architectures.mixers import DeltaNames, DeltaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec, RoutingSpec
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import excerpt

_ATTENTION, _DELTA = "full_attention", "linear_attention"
_MAX_LENGTH = 64  # known models have 4
_MAX_DIM = 1024  # known models have 128

_DELTA_NAMES = DeltaNames(
    qkv="linear_attn.in_proj_qkv",
    z="linear_attn.in_proj_z",
    b="linear_attn.in_proj_b",
    a="linear_attn.in_proj_a",
    convolution="linear_attn.conv1d",
    decay="linear_attn.A_log",
    step="linear_attn.dt_bias",
    norm="linear_attn.norm",
    out="linear_attn.out_proj",
)
_BY_KEY_HEAD = replace(
    _DELTA_NAMES,
    qkv="linear_attn.in_proj_qkvz",
    z="linear_attn.in_proj_qkvz",
    b="linear_attn.in_proj_ba",
    a="linear_attn.in_proj_ba",
)
_NAMES = replace(QK_NORM_NAMES, delta=_DELTA_NAMES, ignored=(*QK_NORM_NAMES.ignored, "mtp.*"))
_SPARSE_NAMES = replace(
    _NAMES,
    router=QWEN2_MOE.names.router,
    expert=QWEN2_MOE.names.expert,
    shared_expert=QWEN2_MOE.names.shared_expert,
    shared_gate=QWEN2_MOE.names.shared_gate,
)
_CHOICES = Choices(norm_plus_one=True, qk_norm="shared", rotated="factor", qkv_bias="attention_bias", out_bias="attention_bias")
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN35_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN35_MOE_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
"""What transformers takes where a config.json is silent, as nested ones are."""


def _hybrid(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Puts the delta rule in the place of attention in the layers that config.json names."""
    kinds = _kinds(spec, values)
    if _ATTENTION not in kinds:
        raise values.error("layer_types", f"has no {_ATTENTION}: a model without keys and values is not supported")
    delta = _delta(values)
    layers = (_recurrent(layer, delta) if kind == _DELTA else layer for layer, kind in zip(spec.layers, kinds, strict=True))
    return replace(spec, layers=tuple(layers), gated_attention=True)


def _kinds(spec: DecoderSpec, values: Values) -> list[Any]:
    kinds = values.per_layer("layer_types", spec.num_layers)
    if kinds is None:
        interval = values.count("full_attention_interval", 4)
        return [_DELTA if (index + 1) % interval else _ATTENTION for index in range(spec.num_layers)]
    unknown = next((kind for kind in kinds if kind not in (_ATTENTION, _DELTA)), None)
    if unknown is not None or len(kinds) > spec.num_layers:
        found = f"got {len(kinds)}" if unknown is None else f"{excerpt(unknown)} is not known"
        raise values.error("layer_types", f"must have {spec.num_layers} entries of {_ATTENTION} or {_DELTA}: {found}")
    return kinds


def _delta(values: Values) -> DeltaSpec:
    num_key_heads, num_value_heads = values.count("linear_num_key_heads"), values.count("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise values.error("linear_num_value_heads", f"is {num_value_heads}, which does not divide over {num_key_heads} keys")
    key_dim, value_dim = (values.count(key, most=_MAX_DIM) for key in ("linear_key_head_dim", "linear_value_head_dim"))
    return DeltaSpec(
        num_key_heads, num_value_heads, key_dim, value_dim, values.count("linear_conv_kernel_dim", most=_MAX_LENGTH)
    )


def _recurrent(layer: LayerSpec, delta: DeltaSpec) -> LayerSpec:
    return replace(layer, rotary=None, state=delta, attention=False)


def _qwen35_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds experts to all layers. There is no other MLP."""
    width = values.count("shared_expert_intermediate_size")
    experts = moe_spec(values, values.count("moe_intermediate_size"), RoutingSpec(normalized=True, added=0.0), width)
    layers = tuple(replace(layer, experts=experts) for layer in spec.layers)
    return _hybrid(replace(spec, layers=layers, intermediate_size=width), values)


def _qwen3_next(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return _hybrid(with_sparse_layers(spec, values, values.count("shared_expert_intermediate_size")), values)


_REFINED = "`mtp` is not read"
QWEN35 = Architecture(
    model_type="qwen3_5_text",
    title="Qwen 3.5",
    names=_NAMES,
    choices=_CHOICES,
    defaults=QWEN35_DEFAULTS,
    refine=_hybrid,
    refined=_REFINED,
)
QWEN35_MOE = Architecture(
    model_type="qwen3_5_moe_text",
    title="Qwen 3.5 and 3.6, mixture of experts",
    names=_SPARSE_NAMES,
    choices=_CHOICES,
    defaults=QWEN35_MOE_DEFAULTS,
    fixed={"intermediate_size": 1},
    refine=_qwen35_moe,
    refined=_REFINED,
)
QWEN3_NEXT = Architecture(
    model_type="qwen3_next",
    title="Qwen 3 Next",
    names=replace(_SPARSE_NAMES, delta=_BY_KEY_HEAD),
    choices=_CHOICES,
    defaults={
        **QWEN35_MOE_DEFAULTS,
        "vocab_size": 151_936,
        "num_hidden_layers": 48,
        "intermediate_size": 5632,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    refine=_qwen3_next,
    refined=_REFINED,
)
