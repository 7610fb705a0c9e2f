"""Nemotron H of NVIDIA: layers that are Mamba 2, attention, an MLP or experts alone, without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices, activation_of
from ryzanstein.worker.architectures.families.deepseek import check_groups, corrected_routing
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.mamba import (
    ATTENTION,
    MAMBA,
    MAX_DIM,
    MAX_LENGTH,
    checked_groups,
    layer_kinds,
    mamba_names,
    step_limits,
)
from ryzanstein.worker.architectures.mixers import MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec, MoeSpec, WeightNames
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": _MLP, "E": _EXPERTS}
_DEFAULT_KINDS = [MAMBA, _EXPERTS, ATTENTION, _MLP]
_OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
_NAMES = WeightNames(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    head="lm_head",
    layer="backbone.layers.{layer}.",
    attention_norm="norm",
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    attention_out="mixer.o_proj",
    mlp_norm="norm",
    gate=None,
    up="mixer.up_proj",
    down="mixer.down_proj",
    mamba=mamba_names("mixer."),
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{expert}.",
    expert_projections=("", "up_proj", "down_proj"),
    shared_expert="mixer.shared_experts.",
    ignored=("mtp.*",),
)


def _renamed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json in transformers' newest words. How many layers there are follows from what each is."""
    changed = {**config, **{new: config[old] for old, new in _OLDER.items() if old in config}}
    kinds = config.get("layers_block_type", config.get("layer_types"))
    if kinds is None and config.get("hybrid_override_pattern") is not None:
        kinds = _kinds_of(config["hybrid_override_pattern"])
    kinds = _DEFAULT_KINDS if kinds is None else kinds
    changed |= {"layer_types": kinds, "layers_block_type": None}
    return changed | {"num_hidden_layers": len(kinds)} if isinstance(kinds, list) else changed


def _kinds_of(pattern: object) -> list[str]:
    unknown = next((letter for letter in pattern if letter not in _LETTERS), None) if isinstance(pattern, str) else pattern
    if not isinstance(pattern, str) or unknown is not None:
        raise CheckpointError(f"config.json: hybrid_override_pattern {excerpt(unknown)} is not known, only {''.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in pattern]


def _hybrid(spec: DecoderSpec, values: Values) -> DecoderSpec:
    kinds = layer_kinds(values, spec.num_layers, (ATTENTION, MAMBA, _MLP, _EXPERTS)) or []
    if ATTENTION not in kinds:
        raise values.error("layer_types", f"has no {ATTENTION}: a model without keys and values is not supported")
    mamba = _mamba(values) if MAMBA in kinds else None
    experts = _experts(values) if _EXPERTS in kinds else None
    layers = (_of_kind(layer, kind, mamba, experts) for layer, kind in zip(spec.layers, kinds, strict=True))
    width = spec.intermediate_size if _MLP in kinds else 1 if experts is None else experts.width
    return replace(spec, layers=tuple(layers), intermediate_size=width)


def _of_kind(layer: LayerSpec, kind: str, mamba: MambaSpec | None, experts: MoeSpec | None) -> LayerSpec:
    return replace(
        layer,
        state=mamba if kind == MAMBA else None,
        attention=kind == ATTENTION,
        mlp=kind in (_MLP, _EXPERTS),
        experts=experts if kind == _EXPERTS else None,
    )


def _experts(values: Values) -> MoeSpec:
    """Returns the experts, which have no gates, and one that sees every token. They are chosen as in DeepSeek V3."""
    experts = moe_spec(values, values.count("moe_intermediate_size"), corrected_routing(values))
    check_groups(experts)
    return replace(experts, shared_width=values.count("moe_shared_expert_intermediate_size"))


def _mamba(values: Values) -> MambaSpec:
    """Returns the state space, with the bounds of steps that NVIDIA's own code takes: `time_step_limit`.

    transformers bounds steps by `time_step_min` instead, those of a prompt and not those of an answer.
    """
    num_heads, biased = values.count("mamba_num_heads", 128), values.flag("use_bias")
    return MambaSpec(
        num_heads=num_heads,
        num_groups=checked_groups(values, "n_groups", values.count("n_groups", 8), num_heads),
        head_dim=values.count("mamba_head_dim", 64, most=MAX_DIM),
        state_dim=values.count("ssm_state_size", 128, most=MAX_DIM),
        length=values.count("conv_kernel", 4, most=MAX_LENGTH),
        activation=activation_of(values, "mamba_hidden_act"),
        convolution_bias=values.flag("use_conv_bias"),
        in_bias=biased,
        out_bias=biased,
        step_limits=step_limits(values),
    )


NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    title="Nemotron H, Nemotron Nano 2 and 3",
    names=_NAMES,
    choices=Choices(positions="none", mlp_bias="mlp_bias"),
    renamed={
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "num_experts": "n_routed_experts",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
    },
    fixed={"tie_word_embeddings": False},
    required={"sliding_window": None, "moe_latent_size": None},
    older=_renamed,
    refine=_hybrid,
    refined="each layer is Mamba 2, attention, an MLP or experts; `mtp` is not read",
)
