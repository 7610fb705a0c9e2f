"""How the models of each architecture call functions and reason, as far as a golden conversation tries it.

The models of other architectures get the generic form: the prompt describes the functions, and a call is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CONVERSATIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cohere2": ("cohere", "cohere"),
        "deepseek_v3": ("generic", "think"),
        "ernie4_5": ("hermes", "response"),
        "ernie4_5_moe": ("hermes", "response"),
        "exaone4": ("hermes", "think"),
        "gemma4_text": ("gemma4", "gemma4"),
        "glm4_moe": ("glm", "think"),
        "glm4_moe_lite": ("glm", "think"),
        "gpt_oss": ("harmony", "harmony"),
        "granite": ("granite", "response"),
        "granitemoe": ("granite", ""),
        "granitemoehybrid": ("hermes", ""),
        "granitemoeshared": ("granite", ""),
        "hunyuan_v1_dense": ("hunyuan", "answer"),
        "lfm2": ("lfm2", "think"),
        "lfm2_moe": ("lfm2", "think"),
        "llama": ("llama3", ""),
        "ministral3": ("ministral", "mistral"),
        "mistral": ("mistral", ""),
        "olmo3": ("olmo3", "think"),
        "qwen2": ("hermes", ""),
        "qwen3": ("hermes", "think"),
        "qwen3_5_moe_text": ("qwen_xml", "think"),
        "qwen3_5_text": ("qwen_xml", "think"),
        "qwen3_moe": ("hermes", "think"),
        "qwen3_next": ("hermes", "think"),
        "seed_oss": ("seed", "seed"),
    }
)
"""The family of calls and the name of the tags around reasoning (empty: none), by `model_type`.

The templates of DeepSeek V3 read no tools.
"""
