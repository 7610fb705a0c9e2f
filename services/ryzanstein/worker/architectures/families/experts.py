"""Mixtures of experts: Mixtral, Qwen 2 and 3. A router picks the MLPs for each token."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, QK_NORM_NAMES, WINDOW_DEFAULTS
from ryzanstein.worker.architectures.spec import DecoderSpec, MoeSpec, RoutingSpec
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import CheckpointError

_ROUTER = "mlp.gate"
_EXPERT = "mlp.experts.{expert}."


def _mixtral(spec: DecoderSpec, values: Values) -> DecoderSpec:
    experts = moe_spec(values, spec.intermediate_size, RoutingSpec(normalized=True))
    return replace(spec, layers=tuple(replace(layer, experts=experts) for layer in spec.layers))


def _qwen2_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return with_sparse_layers(spec, values, values.count("shared_expert_intermediate_size"))


def _qwen3_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return with_sparse_layers(spec, values, None)


def with_sparse_layers(spec: DecoderSpec, values: Values, shared_width: int | None) -> DecoderSpec:
    """Adds experts to one in `decoder_sparse_step` layers, except those listed as dense."""
    routing = RoutingSpec(normalized=values.flag("norm_topk_prob"))
    experts = moe_spec(values, values.count("moe_intermediate_size"), routing, shared_width)
    step, dense = values.count("decoder_sparse_step", 1), values.indices("mlp_only_layers")
    layers = (
        replace(layer, experts=experts if (index + 1) % step == 0 and index not in dense else None)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def moe_spec(values: Values, width: int, routing: RoutingSpec, shared_width: int | None = None) -> MoeSpec:
    """Returns the experts that config.json describes, each of `width` columns."""
    num_experts, top_k = values.count("num_experts"), values.count("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json: num_experts_per_tok is {top_k}, but there are only {num_experts} experts")
    return MoeSpec(num_experts, top_k, width, routing, shared_width)


MIXTRAL = Architecture(
    model_type="mixtral",
    title="Mixtral",
    names=replace(
        LLAMA_NAMES,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{expert}.",
        expert_projections=("w1", "w3", "w2"),
    ),
    choices=Choices(windowed=windows.every_layer, layer_types=False),
    renamed={"num_experts": "num_local_experts"},
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    refine=_mixtral,
)
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    title="Qwen 1.5 and 2, mixture of experts",
    names=replace(
        LLAMA_NAMES,
        router=_ROUTER,
        expert=_EXPERT,
        shared_expert="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate",
    ),
    choices=Choices(qkv_bias="qkv_bias", windowed=windows.even_layers_below),
    defaults={**WINDOW_DEFAULTS, "qkv_bias": True},
    refine=_qwen2_moe,
    refined="dense layers among those with experts",
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    title="Qwen 3, mixture of experts",
    names=replace(QK_NORM_NAMES, router=_ROUTER, expert=_EXPERT),
    choices=Choices(
        qk_norm="shared", qkv_bias="attention_bias", out_bias="attention_bias", windowed=windows.every_layer_if_used
    ),
    renamed={"num_experts": "num_local_experts"},
    defaults={**WINDOW_DEFAULTS, "num_key_value_heads": 4},
    refine=_qwen3_moe,
    refined="dense layers among those with experts",
)
