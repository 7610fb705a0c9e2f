"""Sampling defaults in the metadata of a GGUF file, which llama.cpp writes from generation_config.json and applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ryzanstein.worker.checkpoints.gguf.header import Value

_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_PREFIX = "general.sampling."


def sampling_of(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """Returns the values under the names of generation_config.json, as they were before they became float32."""
    found = {name: metadata.get(_PREFIX + key) for name, key in _NAMES.items()}
    return {name: _shortest(value) for name, value in found.items() if value is not None}


def sampling_metadata(generation: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the metadata for a generation_config.json."""
    found: dict[str, Value] = {}
    for name, key in _NAMES.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[_PREFIX + key] = value if key == "top_k" else float(value)
    return found


def _shortest(value: Value) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value
