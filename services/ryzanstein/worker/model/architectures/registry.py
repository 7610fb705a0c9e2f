"""The architectures that can be served, by the `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ryzanstein.worker.model.architectures import alibi, deepseek, experts, gemma, gpt, llama_like
from ryzanstein.worker.model.architectures.config import Architecture
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.refusal import CheckpointError

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        llama_like.LLAMA,
        llama_like.MISTRAL,
        llama_like.QWEN2,
        llama_like.QWEN3,
        llama_like.GRANITE,
        llama_like.SMOLLM3,
        llama_like.OLMO,
        llama_like.OLMO2,
        llama_like.STABLELM,
        llama_like.COHERE,
        llama_like.STARCODER2,
        llama_like.PHI3,
        llama_like.INTERNLM2,
        gemma.GEMMA,
        gemma.GEMMA2,
        gemma.GEMMA3_TEXT,
        gpt.GPT2,
        gpt.GPT_NEOX,
        gpt.GPTJ,
        gpt.PHI,
        gpt.OPT,
        alibi.BLOOM,
        alibi.FALCON,
        alibi.MPT,
        experts.MIXTRAL,
        experts.QWEN2_MOE,
        experts.QWEN3_MOE,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
    )
}


def read_spec(model_dir: Path) -> DecoderSpec:
    """The decoder in `model_dir`. Raises CheckpointError naming what is missing or not known."""
    return spec_of(_read_config(model_dir / "config.json"))


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a parsed config.json describes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(f"config.json: model_type {model_type!r} is not known, only {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[model_type].spec(config)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config
