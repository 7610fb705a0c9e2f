"""Shapes of synthetic decoders: presets for benchmarks, and a usual shape for a parameter count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HEAD_DIM = 64
_MULTIPLE = 64  # of MLP columns: divides over any power of two of ranks
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a decoder with an untied head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    context_length: int = 2048

    @property
    def num_parameters(self) -> int:
        kv_width = self.hidden_size * self.num_kv_heads // self.num_heads
        attention = 2 * self.hidden_size * (self.hidden_size + kv_width)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size * (2 * self.vocab_size + 1)


PRESETS: Mapping[str, ModelShape] = {
    "S": ModelShape(288, 6, 6, 6, 768, 4096),
    "context": ModelShape(256, 4, 4, 4, 768, 4096, 32_768),
    "L": ModelShape(1024, 16, 16, 4, 2816, 32000),
    "M": ModelShape(2048, 22, 32, 4, 5632, 32000),
}


def shape_of(preset: str | None, params: str | None) -> ModelShape:
    """Returns the named preset, or a shape of about `params` parameters ("25M", "1.1B").

    Raises ValueError.
    """
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}: must be one of {', '.join(PRESETS)}")
        return PRESETS[preset]
    return usual_shape(_count(params or ""))


def usual_shape(num_parameters: float) -> ModelShape:
    """Returns the closest of the shapes that are commonly trained.

    Heads have 64 columns, there is a layer for about every 80 columns of width, and the MLP has 8/3
    of the width.
    """
    vocab_size = 32000 if num_parameters >= 30e6 else 4096
    candidates = [
        _shape(num_heads, num_layers, vocab_size)
        for num_heads in (2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
        for num_layers in _depths(num_heads)
    ]
    return min(candidates, key=lambda shape: abs(shape.num_parameters - num_parameters))


def _depths(num_heads: int) -> range:
    middle = max(2, round(num_heads * _HEAD_DIM / 80))
    return range(max(2, middle * 3 // 4), middle * 5 // 4 + 1)


def _shape(num_heads: int, num_layers: int, vocab_size: int) -> ModelShape:
    hidden_size = num_heads * _HEAD_DIM
    num_kv_heads = next(count for count in (8, 4, 3, 2, 1) if num_heads % count == 0 and count <= max(1, num_heads // 2))
    intermediate_size = -(-hidden_size * 8 // 3 // _MULTIPLE) * _MULTIPLE
    return ModelShape(hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size, vocab_size)


def _count(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"invalid number of parameters {text!r}: write it as 25M or 1.1B")
    return float(match[1]) * _SUFFIXES.get(match[2], 1)
