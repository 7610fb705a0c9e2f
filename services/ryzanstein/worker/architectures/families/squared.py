"""Architectures whose MLP has no gate and squares what is above zero (So et al. 2021): Arcee, Nemotron, Jais 2; and Apertus."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures.config import Architecture
from ryzanstein.worker.architectures.families.llama_like import LLAMA, LLAMA_NAMES

_NAMES = replace(LLAMA_NAMES, gate=None)
_LAYER_NORM = replace(LLAMA.choices, norm="layer", norm_bias=True)

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
