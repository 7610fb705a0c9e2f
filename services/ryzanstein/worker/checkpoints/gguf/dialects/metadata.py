"""Typed access to the metadata of one GGUF file: a key that is missing or wrong is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers
from ryzanstein.worker.refusal import CheckpointError, excerpt


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a file says of its decoder: metadata, shapes of its tensors, and Llama 3's factors if it has them.

    `file` is its name for messages.
    """

    file: str
    metadata: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: Numbers | None = None


FURTHER = "nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class MetadataReader:
    """Reads the metadata of the architecture `name`. Keys are without it. Raises CheckpointError."""

    facts: GgufFacts
    name: str

    def __contains__(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.facts.metadata

    def has_tensor(self, tensor: str) -> bool:
        """Returns whether the file has a tensor, also as a part of a fused one."""
        return tensor in self.facts.shapes or tensor.replace(".attn_q.", ".attn_qkv.") in self.facts.shapes

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """Returns a count for each layer, which may be 0. There may be layers behind them, which predict further tokens."""
        value = self.facts.metadata.get(f"{self.name}.{key}")
        counts: list[Any] = value.tolist() if isinstance(value, np.ndarray) else [value] * num_layers
        own, num_further = counts[:num_layers], len(counts) - num_layers
        if num_further not in (0, self.count(FURTHER, 0)) or not all(isinstance(each, int) and each >= 0 for each in own):
            self.refuse(key, f"must be a count for each of {num_layers} layers, got {excerpt(counts)}")
        return own

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a count above 0; it may be 0 if that is the default."""
        value = self.facts.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and np.all(value == value.flat[0]):
            value = value.flat[0].item()  # one number per layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
            self.refuse(
                key, "is missing" if value is None else f"must be a count, the same for all layers, got {excerpt(value)}"
            )
        return int(value)

    def counts(self, key: str, num_layers: int) -> list[int]:
        """Returns a count above 0 for each layer; the file may have one for all."""
        value = self.facts.metadata.get(f"{self.name}.{key}")
        found: list[Any] = value.tolist() if isinstance(value, np.ndarray) else [value] * num_layers
        if len(found) != num_layers or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in found):
            self.refuse(key, "is missing" if value is None else f"must be a count, or one for each of {num_layers} layers")
        return found

    def flags(self, key: str, num_layers: int) -> list[bool]:
        """Returns true or false for each layer."""
        value = self.facts.metadata.get(f"{self.name}.{key}")
        found: list[Any] = value.tolist() if isinstance(value, np.ndarray) else []
        if len(found) != num_layers or not all(isinstance(each, bool) for each in found):
            self.refuse(key, "is missing" if value is None else f"must be true or false for each of {num_layers} layers")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        value = self.facts.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
            self.refuse(key, "is missing" if value is None else f"must be a finite number, got {excerpt(value)}")
        return shortest(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.facts.metadata.get(f"{self.name}.{key}", default)
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false, got {excerpt(value)}")
        return value

    def word(self, key: str, default: str) -> str:
        value = self.facts.metadata.get(f"{self.name}.{key}", default)
        if not isinstance(value, str):
            self.refuse(key, f"must be a word, got {excerpt(value)}")
        return value

    def refuse(self, key: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.facts.file}: {self.name}.{key} {what}")


def shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: what was in config.json before it became one."""
    return float(str(np.float32(value)))
