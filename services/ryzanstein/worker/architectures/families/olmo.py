"""OLMo 1 to 3 and OLMoE, of the Allen Institute: a norm over all heads together, and norms after the halves from OLMo 2 on."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, POST_NORM_NAMES, QK_NORM_NAMES
from ryzanstein.worker.architectures.rotary.kinds import with_rotary_kinds
from ryzanstein.worker.architectures.spec import DecoderSpec, RoutingSpec
from ryzanstein.worker.architectures.values import Values

_THETA = 500_000.0


def _clipped(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, qkv_clip=values.optional_number("clip_qkv"))


def _olmo3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds a rotation for each kind of layer. Only that of layers without a window has `rope_theta`."""
    return with_rotary_kinds(spec, values, whole_theta=values.number("rope_theta", _THETA), local_theta=_THETA)


def _olmoe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    routing = RoutingSpec(normalized=values.flag("norm_topk_prob"), added=0.0)
    experts = moe_spec(values, spec.intermediate_size, routing)
    layers = tuple(replace(layer, experts=experts) for layer in spec.layers)
    return replace(_clipped(spec, values), layers=layers, clip_after_norm=True)


OLMO = Architecture(
    model_type="olmo",
    title="OLMo 1",
    names=LLAMA_NAMES,
    choices=Choices(norm="layer", norm_weight=False, qkv_bias="attention_bias", out_bias="attention_bias"),
    fixed={"rms_norm_eps": 1e-5},
    refine=_clipped,
    refined="queries, keys and values clipped",
)
OLMO2 = Architecture(
    model_type="olmo2",
    title="OLMo 2",
    names=POST_NORM_NAMES,
    choices=Choices(qk_norm="width", qkv_bias="attention_bias", out_bias="attention_bias"),
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Architecture(
    model_type="olmo3",
    title="OLMo 3",
    names=POST_NORM_NAMES,
    choices=replace(OLMO2.choices, rotated="kinds", windowed=windows.all_but_each_fourth),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    refine=_olmo3,
    refined="positions scaled only in layers without a window",
)
OLMOE = Architecture(
    model_type="olmoe",
    title="OLMoE",
    names=replace(QK_NORM_NAMES, router="mlp.gate", expert="mlp.experts.{expert}."),
    choices=Choices(qk_norm="width", qkv_bias="attention_bias", out_bias="attention_bias"),
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    refine=_olmoe,
    refined="queries, keys and values clipped after their norm",
)
