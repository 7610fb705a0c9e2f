"""Architectures whose MLP has no gate and squares what is above zero (So et al. 2021): Arcee, Nemotron, Jais 2; and Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.llama_like import LLAMA, LLAMA_NAMES, QK_NORM_NAMES, with_rotation
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values

_NAMES = replace(LLAMA_NAMES, gate=None)
_LAYER_NORM = replace(LLAMA.choices, norm="layer", norm_bias=True)
_APERTUS_ROTATION: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 12e6,
}


def _apertus(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, activation="xielu")


ARCEE = Architecture(
    model_type="arcee",
    title="AFM 4.5B",
    names=_NAMES,
    choices=LLAMA.choices,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "intermediate_size": 18432},
)
NEMOTRON = Architecture(
    model_type="nemotron",
    title="Nemotron 4, Minitron",
    names=_NAMES,
    choices=replace(_LAYER_NORM, norm_plus_one=True, rotated="factor"),
    renamed={"rms_norm_eps": "norm_eps"},
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "intermediate_size": 24576,
    },
)
JAIS2 = Architecture(
    model_type="jais2",
    title="Jais 2",
    names=_NAMES,
    choices=_LAYER_NORM,
    renamed={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "intermediate_size": 26624,
    },
)
APERTUS = Architecture(
    model_type="apertus",
    title="Apertus",
    names=replace(
        QK_NORM_NAMES,
        gate=None,
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        activation="mlp.act_fn",
    ),
    choices=Choices(qk_norm="shared", qkv_bias="attention_bias", out_bias="attention_bias"),
    defaults={"rms_norm_eps": 1e-5, "intermediate_size": 14336, "rope_theta": 12e6},
    fixed={"hidden_act": "silu"},
    required={"hidden_act": "xielu"},
    older=partial(with_rotation, usual=_APERTUS_ROTATION),
    refine=_apertus,
    refined="the activation's slopes are learned",
)
