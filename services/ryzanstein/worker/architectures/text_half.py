"""The text half of a multimodal model, as a model of its own: its config.json, and the names of its tensors.

Only text is served; images are refused by name, as a part of a message. With text alone all three
position numbers of a token (mrope of Qwen's models, https://arxiv.org/abs/2409.12191) are equal, and
the rotation is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ryzanstein.worker.architectures.families.gemma4 import GEMMA4_DEFAULTS
from ryzanstein.worker.architectures.families.qwen_hybrid import QWEN35_DEFAULTS, QWEN35_MOE_DEFAULTS

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class _Half:
    """The `model_type` of the text half by that of its `text_config`, and transformers' values for absent keys.

    `tied`: whether embedding and head are one where the outer config.json does not say, which decides
    whatever the inner one says. `fixed`: what its class does whatever the file says.
    """

    types: Mapping[str, str]
    tied: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# Checkpoints leave out what their classes have as a default: Gemma 3 4B has neither heads nor a vocabulary.
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
_QWEN2_VL = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_VL = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
_QWEN3_VL_MOE = {
    **_QWEN3_VL,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
_HALVES: Mapping[str, _Half] = {
    "gemma3": _Half({"gemma3_text": "gemma3_text"}, True, _GEMMA3),
    "gemma4": _Half({"gemma4_text": "gemma4_text"}, True, GEMMA4_DEFAULTS),
    "mistral3": _Half({"mistral": "mistral", "ministral3": "ministral3"}, True),
    "qwen2_5_vl": _Half({"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}, False, _QWEN2_VL),
    "qwen2_vl": _Half({"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}, False, _QWEN2_VL),
    "qwen3_vl": _Half({"qwen3_vl_text": "qwen3"}, False, _QWEN3_VL),
    "qwen3_5": _Half({"qwen3_5_text": "qwen3_5_text"}, False, QWEN35_DEFAULTS),
    "qwen3_5_moe": _Half({"qwen3_5_moe_text": "qwen3_5_moe_text"}, False, QWEN35_MOE_DEFAULTS),
    "qwen3_vl_moe": _Half({"qwen3_vl_moe_text": "qwen3_moe"}, False, _QWEN3_VL_MOE, {"norm_topk_prob": True}),
}
MULTIMODAL = tuple(_HALVES)
"""The model types whose text half is served."""
_SHARED = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config", "dtype", "torch_dtype")
_OTHER = ("vision_config", "text_config", "audio_config", "model_type", "architectures")
_SECTIONS = ("mrope_section", "mrope_interleaved")
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_UNREAD = ("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_half(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the text half; of a model that has none, or is not known here, the same."""
    half = _HALVES.get(str(config.get("model_type")))
    if half is None:
        return config
    nested = config.get("text_config")
    if nested is None:  # the first checkpoints of Qwen's models have it at the top
        nested = {key: value for key, value in config.items() if key not in _OTHER} | {"model_type": config["model_type"]}
    inner = half.types.get(str(nested.get("model_type"))) if isinstance(nested, dict) else None
    if not isinstance(nested, dict) or (inner is None and nested.get("model_type") is not None):
        return config
    shared = {key: config[key] for key in _SHARED if key in config}
    tied = config.get("tie_word_embeddings", half.tied)
    own = {"model_type": inner or next(iter(half.types.values())), "tie_word_embeddings": tied}
    whole = {**half.defaults, **shared, **nested, **half.fixed, **own}
    return _plainly_rotated(whole)


def text_tensors(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Returns the tensors of the text half under the names of a model of its own; of other models the same."""
    if not any(_is_unread(name) for name in entries):
        return entries
    return {_own_name(name): entry for name, entry in entries.items() if not _is_unread(name)}


def _plainly_rotated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config without the sections of mrope."""
    changed = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if isinstance(table, dict) and any(section in table for section in _SECTIONS):
            kept = {name: value for name, value in table.items() if name not in _SECTIONS}
            kept |= {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
            changed[key] = kept
    return changed


def _is_unread(name: str) -> bool:
    return name.removeprefix("model.").startswith(_UNREAD)


def _own_name(name: str) -> str:
    return next((own + name.removeprefix(prefix) for prefix, own in _PREFIXES if name.startswith(prefix)), name)
