"""LFM2 of Liquid AI: short convolutions in most layers, attention in the others; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.mixers import ConvolutionSpec
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec, RoutingSpec, WeightNames
from ryzanstein.worker.architectures.values import MAX_COUNT, Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

_NAMES = WeightNames(
    embedding="model.embed_tokens",
    final_norm="model.embedding_norm",
    head="lm_head",
    layer="model.layers.{layer}.",
    attention_norm="operator_norm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_out="self_attn.out_proj",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    convolution_in="conv.in_proj",
    convolution="conv.conv",
    convolution_out="conv.out_proj",
)
_SPARSE_NAMES = replace(
    _NAMES,
    router="feed_forward.gate",
    router_correction="feed_forward.expert_bias",
    expert="feed_forward.experts.{expert}.",
    expert_projections=("w1", "w3", "w2"),
)
_CHOICES = Choices(qk_norm="shared")
_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}
_RENAMED = {"rms_norm_eps": "norm_eps"}
_FIXED = {"hidden_act": "silu"}
_MAX_PLANES = 64  # known models have one or two
_ATTENTION, _CONVOLUTION = "full_attention", "conv"
_OLD_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}


def _first_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Renames keys of the first checkpoints, which count before the present ones."""
    return {**config, **{new: config[old] for old, new in _OLD_NAMES.items() if old in config}}


def _lfm2(spec: DecoderSpec, values: Values) -> DecoderSpec:
    spec = replace(spec, intermediate_size=_width(spec, values))
    return _with_convolutions(spec, values, _kinds(spec, values))


def _lfm2_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds experts to all layers but the first few."""
    kinds = values.per_layer("layer_types", spec.num_layers)
    if kinds is None:
        raise values.error("layer_types", "is missing")
    routing = RoutingSpec(
        "sigmoid",
        normalized=values.flag("norm_topk_prob"),
        added=1e-6,
        scale=values.number("routed_scaling_factor", 1.0),
        corrected=values.flag("use_expert_bias"),
    )
    experts = moe_spec(values, values.count("moe_intermediate_size", 1792), routing)
    num_dense = values.count("num_dense_layers", 2, least=0)
    layers = (replace(layer, experts=experts if index >= num_dense else None) for index, layer in enumerate(spec.layers))
    return _with_convolutions(replace(spec, layers=tuple(layers)), values, kinds)


def _kinds(spec: DecoderSpec, values: Values) -> list[Any]:
    """Returns the kind of each layer. The first checkpoints list those with attention."""
    kinds = values.per_layer("layer_types", spec.num_layers)
    if kinds is not None:
        return kinds
    if values.optional("full_attn_idxs") is None:
        return [_ATTENTION] * spec.num_layers
    attending = values.indices("full_attn_idxs")
    return [_ATTENTION if index in attending else _CONVOLUTION for index in range(spec.num_layers)]


def _width(spec: DecoderSpec, values: Values) -> int:
    """Returns the columns of an MLP: two thirds of what config.json says, times a factor, rounded up to a multiple."""
    width = spec.intermediate_size
    if not values.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    if (factor := values.optional_number("block_ffn_dim_multiplier")) is None:
        return width
    if factor * width > MAX_COUNT:
        raise values.error("block_ffn_dim_multiplier", f"makes an MLP of more than {MAX_COUNT} columns")
    multiple = values.count("block_multiple_of", 256)
    return multiple * -(-int(factor * width) // multiple)


def _with_convolutions(spec: DecoderSpec, values: Values, kinds: list[Any]) -> DecoderSpec:
    unknown = next((kind for kind in kinds if kind not in (_ATTENTION, _CONVOLUTION)), None)
    if unknown is not None or len(kinds) > spec.num_layers:
        what = (
            f"must have {spec.num_layers} entries, got {len(kinds)}" if unknown is None else f"{excerpt(unknown)} is not known"
        )
        raise values.error("layer_types", what)
    if _CONVOLUTION not in kinds:
        return spec
    if spec.hidden_size % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: hidden_size {spec.hidden_size} does not divide over {spec.num_kv_heads} key-value heads"
        )
    planes = -(-spec.hidden_size // (2 * spec.num_kv_heads * spec.head_dim))
    if planes > _MAX_PLANES:
        raise values.error("hidden_size", f"{spec.hidden_size} is more than {_MAX_PLANES} times the keys and values of a token")
    convolution = ConvolutionSpec(values.count("conv_L_cache", least=2, most=256), planes, values.flag("conv_bias"))
    layers = (
        _convolved(layer, convolution) if kind == _CONVOLUTION else layer
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _convolved(layer: LayerSpec, convolution: ConvolutionSpec) -> LayerSpec:
    return replace(layer, window=convolution.length, rotary=None, convolution=convolution)


LFM2 = Architecture(
    model_type="lfm2",
    title="LFM2, LFM2.5",
    names=_NAMES,
    choices=_CHOICES,
    renamed=_RENAMED,
    defaults={**_DEFAULTS, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "intermediate_size": 12288},
    fixed=_FIXED,
    older=_first_names,
    refine=_lfm2,
    refined="short convolutions in layers that `layer_types` or `full_attn_idxs` tells",
)
LFM2_MOE = Architecture(
    model_type="lfm2_moe",
    title="LFM2, mixture of experts",
    names=_SPARSE_NAMES,
    choices=_CHOICES,
    renamed=_RENAMED,
    defaults={
        **_DEFAULTS,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 7168,
    },
    fixed=_FIXED,
    older=_first_names,
    refine=_lfm2_moe,
    refined="short convolutions in layers that `layer_types` tells, dense first layers",
)
