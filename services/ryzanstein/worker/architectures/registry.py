"""The architectures that can be served, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ryzanstein.worker.architectures.config import Architecture
from ryzanstein.worker.architectures.families import (
    alibi,
    cohere,
    deepseek,
    ernie,
    experts,
    falcon_h1,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    lfm2,
    llama_like,
    mistral,
    nemotron_h,
    olmo,
    qwen_hybrid,
    squared,
)
from ryzanstein.worker.architectures.foreign import refuse_nested
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.text_half import text_half
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.refusal import CheckpointError, excerpt

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        llama_like.LLAMA,
        llama_like.QWEN2,
        llama_like.QWEN3,
        llama_like.SMOLLM3,
        llama_like.STABLELM,
        llama_like.STARCODER2,
        llama_like.PHI3,
        llama_like.INTERNLM2,
        llama_like.SEED_OSS,
        llama_like.HELIUM,
        llama_like.EXAONE4,
        llama_like.HUNYUAN_DENSE,
        llama_like.CWM,
        mistral.MISTRAL,
        mistral.MINISTRAL,
        mistral.MINISTRAL3,
        granite.GRANITE,
        granite.GRANITE_MOE,
        granite.GRANITE_MOE_SHARED,
        granite.GRANITE_HYBRID,
        olmo.OLMO,
        olmo.OLMO2,
        olmo.OLMO3,
        olmo.OLMOE,
        cohere.COHERE,
        cohere.COHERE2,
        glm.GLM,
        glm.GLM4,
        glm.GLM4_MOE,
        glm.GLM4_MOE_LITE,
        ernie.ERNIE,
        ernie.ERNIE_MOE,
        squared.ARCEE,
        squared.NEMOTRON,
        squared.JAIS2,
        squared.APERTUS,
        lfm2.LFM2,
        lfm2.LFM2_MOE,
        gemma.GEMMA,
        gemma.GEMMA2,
        gemma.GEMMA3_TEXT,
        gemma.GEMMA4_TEXT,
        gemma.VAULTGEMMA,
        gpt.GPT2,
        gpt.GPT_NEOX,
        gpt.GPTJ,
        gpt.PHI,
        gpt.OPT,
        gpt_oss.GPT_OSS,
        alibi.BLOOM,
        alibi.FALCON,
        alibi.MPT,
        experts.MIXTRAL,
        experts.QWEN2_MOE,
        experts.QWEN3_MOE,
        qwen_hybrid.QWEN35,
        qwen_hybrid.QWEN35_MOE,
        qwen_hybrid.QWEN3_NEXT,
        nemotron_h.NEMOTRON_H,
        falcon_h1.FALCON_H1,
        falcon_h1.BAMBA,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
    )
}


def read_spec(model_dir: Path) -> DecoderSpec:
    """Returns the decoder in `model_dir`.

    Raises CheckpointError, which names what is missing or not known.
    """
    return spec_of(read_config(model_dir))


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """Returns the decoder that a parsed config.json describes."""
    refuse_nested(config, ARCHITECTURES)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(f"config.json: model_type {excerpt(model_type)} is not supported, only {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[model_type].spec(config)


def context_of(config: Mapping[str, Any]) -> int:
    """Returns how many tokens a sequence of the model may have; of an unknown architecture, what its positions are."""
    values = values_of(config)
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    return values.count("max_position_embeddings") if architecture is None else architecture.context_length(values)


def values_of(config: Mapping[str, Any]) -> Values:
    """Returns a config.json under Llama's names, read as its architecture does.

    An unknown architecture is read like Llama.
    """
    model_type = config.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        return Values(config)
    return Values(config, renamed=architecture.renamed, defaults=architecture.defaults)


def read_config(model_dir: Path) -> Mapping[str, Any]:
    """Returns the parsed config.json, of a multimodal model that of its text half. Raises CheckpointError."""
    path = model_dir / "config.json"
    try:
        return text_half(read_object(path))
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error}") from error
