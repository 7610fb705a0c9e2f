"""The architectures that are converted."""

from __future__ import annotations

from collections.abc import Mapping

from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.latents import SIGMOID
from ryzanstein.worker.checkpoints.gguf.dialects.rows.hybrids import (
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
)
from ryzanstein.worker.checkpoints.gguf.dialects.rows.plain import (
    ARCEE,
    BLOOM,
    COHERE,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE,
    ERNIE_MOE,
    EXAONE4,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_MOE,
    HUNYUAN_DENSE,
    INTERNLM2,
    JAIS2,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    MPT,
    NEMOTRON,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    READ_INTERNLM2,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, excerpt

DIALECTS = (
    *(LLAMA, MISTRAL, MIXTRAL, INTERNLM2, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3),
    *(GEMMA, GEMMA2, GEMMA3, GEMMA4, GRANITE, SMOLLM3, OLMO, OLMO2, PHI, PHI3, COHERE, STABLELM, STARCODER2),
    *(GPT2, GPT_NEOX, FALCON, BLOOM, MPT),
    *(ARCEE, NEMOTRON, JAIS2, OLMOE, HUNYUAN_DENSE, SEED_OSS, ERNIE, ERNIE_MOE, GLM, GLM4, COHERE2, EXAONE4),
    *(LFM2, LFM2_MOE, MINISTRAL3, OLMO3, GPT_OSS, QWEN35, QWEN35_MOE, QWEN3_NEXT, GRANITE_MOE, GLM4_MOE, GLM4_MOE_LITE),
    *(GRANITE_HYBRID, FALCON_H1, NEMOTRON_H, NEMOTRON_H_MOE),
)
"""Those that are written. Where several have a name, a file with it is the first, unless its metadata tell otherwise."""


def dialect_of_file(metadata: Mapping[str, Value], file: str) -> Dialect:
    """Returns the dialect of a file with this metadata. Raises CheckpointError.

    Llama and Mistral are one architecture in a file, which is read as Llama, and so is InternLM 2,
    of which only the stacking of queries, keys and values is different.
    """
    name = metadata.get("general.architecture")
    experts, gating = metadata.get("llama.expert_count"), metadata.get("deepseek2.expert_gating_func")
    match name:
        case "llama" if isinstance(experts, int) and experts > 0:
            return MIXTRAL
        case "deepseek2" if isinstance(gating, int) and gating == SIGMOID:
            return DEEPSEEK_V3
        case "internlm2":
            return READ_INTERNLM2
        case "olmo2" if "olmo2.attention.sliding_window" in metadata:
            return OLMO3
    found = next((dialect for dialect in DIALECTS if dialect.name == name), None)
    if found is None:
        known = ", ".join(sorted({dialect.name for dialect in DIALECTS}))
        raise CheckpointError(f"{file}: general.architecture {excerpt(name)} is not supported, only {known}")
    return found


def dialect_of_model(model_type: str, file: str, *, sparse: bool = False) -> Dialect:
    """Returns the dialect for a model of this `model_type`; `sparse`: it has experts. Raises CheckpointError."""
    own = sorted((dialect for dialect in DIALECTS if dialect.model_type == model_type), key=lambda each: each.sparse != sparse)
    found = own[0] if own else None
    if found is None:
        known = ", ".join(sorted(dialect.model_type for dialect in DIALECTS))
        raise CheckpointError(f"{file}: model_type {excerpt(model_type)} cannot be written as GGUF, only {known}")
    return found
