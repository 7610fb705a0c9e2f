"""The architectures that are converted, and in what llama.cpp's files differ for each.

A `Dialect` is the difference between one of our architectures and llama.cpp's view of it. Tensors
are named by role (`tensor_places`), hyper-parameters by `hyper_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.worker.model.refusal import CheckpointError, shown


@dataclass(frozen=True, slots=True)
class Dialect:
    """How llama.cpp stores an architecture.

    `name` is `general.architecture`, `model_type` that of config.json, `class_name` transformers'
    class. `permuted`: rows of queries and keys are reordered so that pairs of a rotation are
    neighbours. `plus_one`: norms are stored with one added. `layer_norm`: the key of the norm's
    epsilon is that of layer norms. `fixed` has what config.json needs and the file does not say.
    `scalars` maps keys of config.json to keys of the file that have the same number, `assumed` has
    those numbers where a file may lack them. `biases` maps flags of config.json to the tensor whose
    presence they tell.
    """

    name: str
    model_type: str
    class_name: str
    permuted: bool = False
    plus_one: bool = False
    layer_norm: bool = False
    windowed: bool = False
    scalars: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, float | None] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)


_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_SILU = {"hidden_act": "silu"}
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}

LLAMA = Dialect(
    "llama",
    "llama",
    "LlamaForCausalLM",
    permuted=True,
    fixed=_SILU,
    biases={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
MISTRAL = Dialect("llama", "mistral", "MistralForCausalLM", permuted=True, fixed={**_SILU, "sliding_window": None})
QWEN2 = Dialect("qwen2", "qwen2", "Qwen2ForCausalLM", fixed={**_SILU, "use_sliding_window": False})
QWEN3 = Dialect("qwen3", "qwen3", "Qwen3ForCausalLM", fixed={**_SILU, "use_sliding_window": False}, biases=_ATTENTION_BIAS)
GEMMA = Dialect("gemma", "gemma", "GemmaForCausalLM", plus_one=True, fixed=_GEMMA)
GEMMA2 = Dialect(
    "gemma2",
    "gemma2",
    "Gemma2ForCausalLM",
    plus_one=True,
    windowed=True,
    scalars={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    assumed={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed=_GEMMA,
)
GEMMA3 = Dialect(
    "gemma3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    plus_one=True,
    windowed=True,
    scalars={"final_logit_softcapping": "final_logit_softcapping"},
    assumed={"final_logit_softcapping": None},
    fixed=_GEMMA,
)
GRANITE = Dialect(
    "granite",
    "granite",
    "GraniteForCausalLM",
    permuted=True,
    scalars={
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    fixed={**_SILU, "mlp_bias": False},
    biases=_ATTENTION_BIAS,
)
SMOLLM3 = Dialect(
    "smollm3",
    "smollm3",
    "SmolLM3ForCausalLM",
    permuted=True,
    fixed={**_SILU, "no_rope_layer_interval": 4, "use_sliding_window": False, "mlp_bias": False},
    biases=_ATTENTION_BIAS,
)
OLMO2 = Dialect("olmo2", "olmo2", "Olmo2ForCausalLM", fixed=_SILU, biases=_ATTENTION_BIAS)
PHI3 = Dialect("phi3", "phi3", "Phi3ForCausalLM", fixed={**_SILU, "sliding_window": None})
COHERE = Dialect(
    "command-r",
    "cohere",
    "CohereForCausalLM",
    layer_norm=True,
    scalars={"logit_scale": "logit_scale"},
    fixed={**_SILU, "attention_bias": False},
    biases={"use_qk_norm": "blk.0.attn_q_norm.weight"},
)
STARCODER2 = Dialect(
    "starcoder2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    layer_norm=True,
    fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    biases={"use_bias": "blk.0.attn_q.bias"},
)

DIALECTS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GRANITE, SMOLLM3, OLMO2, PHI3, COHERE, STARCODER2)


def dialect_of_file(name: object, file: str) -> Dialect:
    """Returns the dialect of a file with this `general.architecture`. Raises CheckpointError.

    Llama and Mistral are one architecture in a file; it is read as Llama.
    """
    found = next((dialect for dialect in DIALECTS if dialect.name == name), None)
    if found is None:
        known = ", ".join(sorted({dialect.name for dialect in DIALECTS}))
        raise CheckpointError(f"{file}: general.architecture {shown(name)} is not supported, only {known}")
    return found


def dialect_of_model(model_type: str, file: str) -> Dialect:
    """Returns the dialect for a model of this `model_type`. Raises CheckpointError."""
    found = next((dialect for dialect in DIALECTS if dialect.model_type == model_type), None)
    if found is None:
        known = ", ".join(sorted(dialect.model_type for dialect in DIALECTS))
        raise CheckpointError(f"{file}: model_type {shown(model_type)} cannot be written as GGUF, only {known}")
    return found
