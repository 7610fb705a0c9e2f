"""ERNIE 4.5 of Baidu: neighbours are paired in the rotation; biases everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, with_own_head_dim
from ryzanstein.worker.architectures.spec import DecoderSpec, RoutingSpec
from ryzanstein.worker.architectures.values import MAX_LAYERS, Values

_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0}


def _ernie_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds experts to one in `moe_layer_interval` layers from `moe_layer_start_index` to `moe_layer_end_index`."""
    width, num_shared = values.count("moe_intermediate_size", 1536), values.count("moe_num_shared_experts", 2, least=0)
    routing = RoutingSpec(
        normalized=True, corrected=True, correction_row=True, added=0.0, least=values.number("moe_norm_min", 1e-12)
    )
    experts = moe_spec(values, width, routing, width * num_shared if num_shared else None)
    first, last = values.count("moe_layer_start_index", 1, least=0), _last(values, spec.num_layers)
    every = values.count("moe_layer_interval", 1)
    layers = (
        replace(layer, experts=experts if first <= index <= last and (index + 1) % every == 0 else None)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers), head_bias=spec.qkv_bias)


def _last(values: Values, num_layers: int) -> int:
    """Returns the last layer that may have experts; -1 stands for the last of all."""
    last = values.count("moe_layer_end_index", -1, least=-1, most=MAX_LAYERS)
    return num_layers - 1 if last == -1 else last


ERNIE = Architecture(
    model_type="ernie4_5",
    title="ERNIE 4.5, dense",
    names=LLAMA_NAMES,
    choices=Choices(interleaved=True, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    defaults={**_DEFAULTS, "head_dim": 128, "num_key_value_heads": 2},
    older=with_own_head_dim,
)
ERNIE_MOE = Architecture(
    model_type="ernie4_5_moe",
    title="ERNIE 4.5, mixture of experts",
    names=replace(
        LLAMA_NAMES,
        router="mlp.gate",
        router_correction="mlp.moe_statics.e_score_correction_bias",
        expert="mlp.experts.{expert}.",
        shared_expert="mlp.shared_experts.",
    ),
    choices=ERNIE.choices,
    renamed={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    defaults={**_DEFAULTS, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 6},
    refine=_ernie_moe,
    refined="layers with experts from `moe_layer_start_index` to `moe_layer_end_index`, one in `moe_layer_interval`",
)
