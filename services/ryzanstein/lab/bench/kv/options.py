"""The ways to keep keys and values that are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.cold_layout import (
    DEFAULT_HOT_TOKENS,
    PAGE_TOKENS,
    ColdLayout,
    Compression,
    KvCompression,
    compression_of,
)


@dataclass(frozen=True, slots=True)
class KvOption:
    """A row of the tables. `dtype` is that of what is not compressed."""

    name: str
    setting: KvCompression
    dtype: torch.dtype
    hot_tokens: int = DEFAULT_HOT_TOKENS

    def compression(self, num_layers: int) -> Compression | None:
        return compression_of(self.setting, self.hot_tokens, num_layers)

    def bytes_per_token(self, spec: DecoderSpec) -> float:
        """Returns the bytes of a token's keys and values over all layers, once its page is cold everywhere."""
        compression = self.compression(spec.num_layers)
        full = 2 * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        if compression is None:
            return full * spec.num_layers
        layout = ColdLayout(compression.kind, spec.num_kv_heads, spec.head_dim)
        cold = layout.block_bytes / PAGE_TOKENS
        return full * compression.first_layer + cold * (spec.num_layers - compression.first_layer)


OPTIONS: tuple[KvOption, ...] = (
    KvOption("float32", "none", torch.float32),
    KvOption("float16", "none", torch.float16),
    KvOption("B: lazy-fp8", "lazy-fp8", torch.float32),
    KvOption("B: lazy-fp8, 128 hot", "lazy-fp8", torch.float32, 128),
    KvOption("A: eager-fp8", "eager-fp8", torch.float32),
    KvOption("C: late-fp8", "late-fp8", torch.float32),
    KvOption("lazy-int8", "lazy-int8", torch.float32),
    KvOption("lazy-fp8-values", "lazy-fp8-values", torch.float32),
)
"""The first is the reference."""
