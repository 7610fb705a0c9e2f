"""Granite 3 and 4 of IBM: factors for embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA, LLAMA_NAMES
from ryzanstein.worker.architectures.families.mamba import (
    ATTENTION,
    MAMBA,
    MAMBA_DEFAULTS,
    layer_kinds,
    mamba_names,
    mamba_spec,
)
from ryzanstein.worker.architectures.spec import DecoderSpec, RoutingSpec
from ryzanstein.worker.architectures.values import Values

_BIASES = Choices(qkv_bias="attention_bias", out_bias="attention_bias")
_SHARED, _SHARED_PROJECTIONS = "shared_mlp.", ("input_linear", "input_linear", "output_linear")
_SPARSE = replace(LLAMA_NAMES, router="block_sparse_moe.router.layer", expert="block_sparse_moe.experts.{expert}.")
_SHARED_SPARSE = replace(_SPARSE, shared_expert=_SHARED, shared_projections=_SHARED_PROJECTIONS)
_FACTORS = "factors for embeddings, scores, residuals and logits"
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}


def _granite(spec: DecoderSpec, values: Values) -> DecoderSpec:
    scale = values.number("attention_multiplier", 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, attention_scale=scale) for layer in spec.layers),
        embedding_scale=values.number("embedding_multiplier", 1.0),
        residual_scale=values.number("residual_multiplier", 1.0),
        logit_scale=1 / values.number("logits_scaling", 1.0),
    )


def _sparse(spec: DecoderSpec, values: Values, shared_width: int | None) -> DecoderSpec:
    """Adds experts to all layers. Softmax over the chosen ones is softmax over all, scaled to add up to 1."""
    experts = moe_spec(values, spec.intermediate_size, RoutingSpec(normalized=True, added=0.0), shared_width)
    layers = tuple(replace(layer, experts=experts) for layer in spec.layers)
    return _granite(replace(spec, layers=layers), values)


def _moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return _sparse(spec, values, None)


def _moe_shared(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return _sparse(spec, values, values.count("shared_intermediate_size", 0, least=0) or None)


def _hybrid(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Takes positions from `position_embedding_type`; without experts, the MLP is what is shared with them.

    Raises CheckpointError for layers that are neither attention nor Mamba 2, or without any attention.
    """
    kinds = layer_kinds(values, spec.num_layers, (ATTENTION, MAMBA))
    if kinds is None or ATTENTION not in kinds:
        raise values.error("layer_types", f"has no {ATTENTION}: a model without keys and values is not supported")
    mamba = mamba_spec(spec, values, values.count("mamba_expand") * spec.hidden_size) if MAMBA in kinds else None
    rotary = 0 if values.optional("position_embedding_type") == "rope" else None
    attention = tuple(replace(layer, rotary=rotary) for layer in spec.layers)
    layers = (
        replace(layer, rotary=None, state=mamba, attention=False) if kind == MAMBA else layer
        for kind, layer in zip(kinds, attention, strict=True)
    )
    spec = replace(spec, layers=tuple(layers))
    width = values.count("shared_intermediate_size")
    if values.count("num_experts", least=0):
        return _sparse(spec, values, width)
    gate, up, down = (_SHARED + name for name in _SHARED_PROJECTIONS)
    names = replace(spec.names, gate=gate, up=up, down=down)
    return _granite(replace(spec, names=names, intermediate_size=width), values)


GRANITE = Architecture(
    model_type="granite",
    title="Granite 3",
    names=LLAMA_NAMES,
    choices=LLAMA.choices,
    refine=_granite,
    refined=_FACTORS,
)
GRANITE_MOE = Architecture(
    model_type="granitemoe",
    title="Granite 3, mixture of experts",
    names=_SPARSE,
    choices=_BIASES,
    renamed={"num_experts": "num_local_experts"},
    defaults=_EXPERTS,
    refine=_moe,
    refined=_FACTORS,
)
GRANITE_MOE_SHARED = Architecture(
    model_type="granitemoeshared",
    title="Granite 3, mixture of experts with a shared one",
    names=_SHARED_SPARSE,
    choices=_BIASES,
    renamed={"num_experts": "num_local_experts"},
    defaults=_EXPERTS,
    refine=_moe_shared,
    refined=_FACTORS,
)
GRANITE_HYBRID = Architecture(
    model_type="granitemoehybrid",
    title="Granite 4",
    names=replace(_SHARED_SPARSE, mamba=mamba_names("mamba.")),
    choices=_BIASES,
    renamed={"num_experts": "num_local_experts"},
    defaults={**_EXPERTS, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
    refine=_hybrid,
    refined=f"{_FACTORS}; no positions where `position_embedding_type` is not `rope`; dense where `num_local_experts` is 0",
)
