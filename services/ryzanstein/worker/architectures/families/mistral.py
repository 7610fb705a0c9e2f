"""Mistral's dense models: Mistral 7B to Small, Ministral 8B, and Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, with_own_head_dim
from ryzanstein.worker.architectures.rotary.config import original_context, rotary_table
from ryzanstein.worker.architectures.spec import DecoderSpec, QueryGrowth
from ryzanstein.worker.architectures.values import Values


def _ministral3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds the growth of queries, whose numbers are among those of the rotation."""
    table = rotary_table(values)
    growth = QueryGrowth(table.number("llama_4_scaling_beta"), original_context(values, table))
    return replace(spec, rotaries=tuple(replace(rotary, growth=growth) for rotary in spec.rotaries))


MISTRAL = Architecture(
    model_type="mistral",
    title="Mistral",
    names=LLAMA_NAMES,
    choices=Choices(windowed=windows.every_layer),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
MINISTRAL = Architecture(
    model_type="ministral",
    title="Ministral 8B of 2024",
    names=LLAMA_NAMES,
    choices=MISTRAL.choices,
    defaults=MISTRAL.defaults,
)
MINISTRAL3 = Architecture(
    model_type="ministral3",
    title="Ministral 3, text half",
    names=LLAMA_NAMES,
    choices=replace(MISTRAL.choices, layer_types=False),
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    older=with_own_head_dim,
    refine=_ministral3,
    refined="queries grow with their position",
)
