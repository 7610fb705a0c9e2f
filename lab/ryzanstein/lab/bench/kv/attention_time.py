"""The time of one call of attention: single new tokens of a batch, all options in turns.

Legend: B blocks, N slots, C columns of a slot, S sequences, K key-value heads, G query heads of a
group, D head dimension.

What one huge channel of a head's keys costs: the error of attention's answer, on synthetic keys.

Keys and queries are normal numbers; one channel of the keys is a constant and some noise, both so
many times as large, as models have them. Its queries are as much smaller, so that the scores keep
their size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ryzanstein.lab.bench.kv.options import HOT_TOKENS
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions, ColdKeys, PagedKeys
from ryzanstein.worker.kernels.functions.cold_layout import (
    CHANNELS,
    FP8,
    FP8_VALUES,
    INT8,
    PAGE_TOKENS,
    ColdKind,
    ColdLayout,
    sees_cold,
)

_ROUNDS = 30
_LONGEST_S = 2.0
MOST_BYTES = 9 * 2**28  # of a float32 cache; all kinds together take almost three times as much

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


def attention_times(kernels: AttentionFunctions, heads: Heads, batch: int, context: int) -> dict[str, float]:
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


def _call(kernels: AttentionFunctions, heads: Heads, size: tuple[int, int], dtype: torch.dtype, kind: ColdKind | None) -> Call:
    batch, context = size
    num_pages = -(-context // PAGE_TOKENS)
    first = 0 if kind is None else sees_cold(context - 1, HOT_TOKENS)
    slots_NC, table_SB = _pages(heads, batch, num_pages - first, dtype)
    cold, cold_BX = None, None
    if kind is not None:
        layout, count = ColdLayout(kind, heads.kv, heads.dim), batch * num_pages
        cold_BX = torch.empty(count, layout.block_bytes, dtype=torch.uint8)
        all_B = torch.arange(count)
        kernels.seal(slots_NC, all_B % table_SB.numel(), cold_BX, all_B, layout)  # any numbers will do
        cold = ColdKeys(torch.randperm(count).view(batch, num_pages), layout, HOT_TOKENS)
    one_S, length_S, first_S = (torch.full((batch,), number) for number in (1, context, first))
    keys = PagedKeys(torch.arange(batch), one_S, table_SB, length_S, PAGE_TOKENS, first_S=first_S, cold=cold)
    q_TKGD = torch.randn(batch, heads.kv, heads.group, heads.dim)
    out_TKGD, scoring = torch.empty_like(q_TKGD), (heads.dim**-0.5, None)

    def call() -> None:
        kernels.attend(q_TKGD, slots_NC, keys, scoring, out_TKGD, cold_BX=cold_BX)

    return call


def _pages(heads: Heads, batch: int, num_pages: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns slots of random numbers, and the tables of sequences whose pages are scattered."""
    slots_NC = torch.empty(batch * num_pages * PAGE_TOKENS, 2 * heads.kv * heads.dim, dtype=dtype).normal_()
    return slots_NC, torch.randperm(batch * num_pages).view(batch, num_pages)


FACTORS = (1.0, 10.0, 100.0, 1000.0)
_TOKENS, _DIM, _GROUP, _SEED = 1024, 128, 8, 17


def outlier_errors(kernels: AttentionFunctions, factor: float) -> dict[str, float]:
    """Returns the root of the mean square of each kind's error, divided by that of the exact answer."""
    generator = torch.Generator().manual_seed(_SEED)
    slots_NC = torch.randn(_TOKENS, 2 * _DIM, generator=generator)
    slots_NC[:, 0] = (slots_NC[:, 0] * 0.2 + 1) * factor
    q_TKGD = torch.randn(1, 1, _GROUP, _DIM, generator=generator)
    q_TKGD[..., 0] /= factor
    keys_LD, values_LD = slots_NC[:, :_DIM].double(), slots_NC[:, _DIM:].double()
    exact_GD = (q_TKGD[0, 0].double() @ keys_LD.T * _DIM**-0.5).softmax(1) @ values_LD
    found = {}
    for name, (dtype, kind) in KINDS.items():
        table_1B, cold, cold_BX = torch.arange(_TOKENS // PAGE_TOKENS).unsqueeze(0), None, None
        if kind is not None:
            layout = ColdLayout(kind, 1, _DIM)
            cold, cold_BX = (
                ColdKeys(table_1B, layout, HOT_TOKENS),
                torch.zeros(len(table_1B[0]), layout.block_bytes, dtype=torch.uint8),
            )
            kernels.seal(slots_NC, table_1B[0], cold_BX, table_1B[0], layout)
        one, zero, length = (torch.tensor([n]) for n in (1, 0, _TOKENS))
        keys = PagedKeys(zero, one, table_1B, length, PAGE_TOKENS, cold=cold)
        out_TKGD = torch.empty_like(q_TKGD)
        kernels.attend(q_TKGD, slots_NC.to(dtype), keys, (_DIM**-0.5, None), out_TKGD, cold_BX=cold_BX)
        error = (out_TKGD[0, 0].double() - exact_GD).square().mean().sqrt() / exact_GD.square().mean().sqrt()
        found[name] = float(error)
    return found
