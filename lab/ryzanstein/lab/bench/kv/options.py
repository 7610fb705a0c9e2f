"""The ways to keep keys and values that are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.kernels.functions.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, PAGE_TOKENS, ColdKind, ColdLayout
from ryzanstein.worker.settings.sparse import SparseRule

HOT_TOKENS = 16  # the least


@dataclass(frozen=True, slots=True)
class KvOption:
    """A row of the tables.

    `kind` is that of compressed pages, None for none; `dtype` that of all others. `late`: only the
    second half of the layers is compressed. `rule`: layers that would read everything read sparsely.
    """

    name: str
    dtype: torch.dtype
    kind: ColdKind | None = None
    hot_tokens: int = HOT_TOKENS
    late: bool = False
    rule: SparseRule | None = None

    def layout(self, spec: DecoderSpec, layer: int) -> ColdLayout | None:
        """Returns how a layer's pages are compressed, if they are."""
        if self.kind is None or (self.late and layer < spec.num_layers // 2):
            return None
        return ColdLayout(self.kind, spec.num_kv_heads, spec.head_dim)

    def bytes_per_token(self, spec: DecoderSpec) -> float:
        """Returns the bytes of a token over all layers, once its page is cold."""
        full = 2 * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        layouts = (self.layout(spec, layer) for layer in range(spec.num_layers))
        return sum(full if layout is None else layout.block_bytes / PAGE_TOKENS for layout in layouts)


OPTIONS: tuple[KvOption, ...] = (
    KvOption("float32", torch.float32),
    KvOption("float16", torch.float16),
    KvOption("A: eager FP8", torch.float32, FP8, hot_tokens=0),
    KvOption("B: lazy FP8", torch.float32, FP8),
    KvOption("B with 128 hot tokens", torch.float32, FP8, hot_tokens=128),
    KvOption("C: late layers FP8", torch.float32, FP8, late=True),
    KvOption("lazy int8", torch.float32, INT8),
    KvOption("lazy FP8 values, 16-bit keys", torch.float32, FP8_VALUES),
    KvOption("lazy int8 keys by channel", torch.float32, CHANNELS),
)
"""The first is the reference. Eager: a page is cold as soon as it is full."""
