"""The time of one call of attention: single new tokens of a batch, all options in turns.

Legend: B blocks, N slots, C columns of a slot, S sequences, K key-value heads, G query heads of a
group, D head dimension.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ryzanstein.lab.bench.kv.options import HOT_TOKENS
from ryzanstein.worker.model.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, PAGE_TOKENS, ColdKind, ColdLayout
from ryzanstein.worker.model.kernels.native import ColdKeys, NativeKernels, PagedKeys

_ROUNDS = 30
_LONGEST_S = 2.0
MOST_BYTES = 2 * 2**30  # of one option's cache

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer: key-value heads, query heads of each, numbers of each."""

    name: str
    kv: int
    group: int
    dim: int

    def cache_bytes(self, batch: int, context: int) -> int:
        return 2 * 4 * self.kv * self.dim * batch * context


SHAPES = (Heads("Gemma 3 270M: 1 x 4 x 256", 1, 4, 256), Heads("M: 4 x 8 x 64", 4, 8, 64), Heads("8 x 4 x 128", 8, 4, 128))
KINDS: Mapping[str, tuple[torch.dtype, ColdKind | None]] = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, None),
    "FP8": (torch.float32, FP8),
    "int8": (torch.float32, INT8),
    "FP8 values": (torch.float32, FP8_VALUES),
    "int8 channels": (torch.float32, CHANNELS),
}


def attention_times(kernels: NativeKernels, heads: Heads, batch: int, context: int) -> dict[str, float]:
    """Returns the median of each kind of cache, in seconds."""
    calls = {name: _call(kernels, heads, (batch, context), *kind) for name, kind in KINDS.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began_s = time.perf_counter()
    while len(found["float32"]) < _ROUNDS and time.perf_counter() - began_s < _LONGEST_S:
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(times) for name, times in found.items()}


def _call(kernels: NativeKernels, heads: Heads, size: tuple[int, int], dtype: torch.dtype, kind: ColdKind | None) -> Call:
    batch, context = size
    num_pages = -(-context // PAGE_TOKENS)
    count, columns = batch * num_pages, 2 * heads.kv * heads.dim
    slots_NC = torch.empty(count * PAGE_TOKENS, columns, dtype=dtype).normal_()
    table_SB = torch.randperm(count).view(batch, num_pages)
    cold, cold_BX = None, None
    if kind is not None:
        layout, all_B = ColdLayout(kind, heads.kv, heads.dim), torch.arange(count)
        cold, cold_BX = ColdKeys(table_SB, layout, HOT_TOKENS), torch.zeros(count, layout.block_bytes, dtype=torch.uint8)
        kernels.seal(slots_NC, all_B, cold_BX, all_B, layout)
    one_S, length_S = torch.ones(batch, dtype=torch.int64), torch.full((batch,), context)
    keys = PagedKeys(torch.arange(batch), one_S, table_SB, length_S, PAGE_TOKENS, cold=cold)
    q_TKGD = torch.randn(batch, heads.kv, heads.group, heads.dim)
    out_TKGD, scoring = torch.empty_like(q_TKGD), (heads.dim**-0.5, None)

    def call() -> None:
        kernels.attend(q_TKGD, slots_NC, keys, scoring, out_TKGD, cold_BX=cold_BX)

    return call
