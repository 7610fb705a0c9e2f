"""What is compressed in a KV cache: the settings of docs/internals/decisions.md by name.

Lazy: a page is read compressed by tokens that are at least so many away from its end, see `Extents`.
Eager: as soon as it is full.
"""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, PAGE_TOKENS, ColdKind, ColdLayout
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import KvCompression

_KINDS: dict[KvCompression, ColdKind] = {
    "lazy-fp8": FP8,
    "eager-fp8": FP8,
    "lazy-int8": INT8,
    "lazy-fp8-values": FP8_VALUES,
    "lazy-int8-channels": CHANNELS,
}


@dataclass(frozen=True, slots=True)
class Zones:
    """The two zones of a rank's cache: `hot_tokens` in full precision, older ones compressed."""

    hot_tokens: int
    layout: ColdLayout


def zones_of(
    compression: KvCompression, hot_tokens: int, block_size: int, spec: DecoderSpec, tp: TensorParallel
) -> Zones | None:
    """Returns the zones of a cache, or None if nothing is compressed. Raises ModelRefused."""
    if compression == "none":
        return None
    if block_size != PAGE_TOKENS:
        raise ModelRefused(f"kv_compression {compression} needs a block_size of {PAGE_TOKENS}, got {block_size}")
    layout = ColdLayout(_KINDS[compression], tp.heads(spec.num_heads, spec.num_kv_heads).num_kv_heads, spec.head_dim)
    return Zones(0 if compression == "eager-fp8" else hot_tokens, layout)


def without_compression(spec: DecoderSpec, has_kernels: bool) -> str:
    """Returns why nothing can be compressed, or an empty string."""
    if spec.latent is not None:
        return "latents are not compressed: they are few numbers for all heads already"
    if spec.has_convolutions:
        return "short convolutions are not compressed: a sequence keeps few of their tokens"
    if spec.has_own_heads:
        return "layers with heads of different sizes are not compressed"
    if spec.states:
        return "a model with states is not compressed: few of its layers keep keys and values"
    return "" if has_kernels else "only our own kernels read compressed keys and values, and they do not run here"
