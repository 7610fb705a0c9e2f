"""Command R and Command A of Cohere: halves of a layer in parallel, logits scaled."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, QK_NORM_NAMES
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values


def _cohere(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, logit_scale=values.number("logit_scale", 0.0625))


def _cohere2(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Removes positions from layers without a window."""
    layers = tuple(replace(layer, rotary=None if layer.window is None else 0) for layer in spec.layers)
    return _cohere(replace(spec, layers=layers), values)


COHERE = Architecture(
    model_type="cohere",
    title="Command R",
    names=replace(QK_NORM_NAMES, mlp_norm=None),
    choices=Choices(
        norm="layer",
        qk_norm="heads",
        qk_normed="use_qk_norm",
        interleaved=True,
        parallel=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    renamed={"rms_norm_eps": "layer_norm_eps"},
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0},
    refine=_cohere,
    refined="logits scaled",
)
COHERE2 = Architecture(
    model_type="cohere2",
    title="Command R7B, Command A",
    names=replace(LLAMA_NAMES, mlp_norm=None),
    choices=replace(COHERE.choices, qk_norm=None, windowed=windows.all_but_one_in_a_pattern),
    renamed=COHERE.renamed,
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096},
    fixed={"head_dim": None},
    refine=_cohere2,
    refined="logits scaled, positions only in layers with a window",
)
