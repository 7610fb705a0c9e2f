"""Sparse attention of models that were not trained with it: what the setting `sparse_attention` says.

A rule names what a token reads of the tokens before it: the last ones (`window`), and of the older
ones the first (`sinks`; Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
2024), every so many pages (`stride`; Child et al., "Generating Long Sequences with Sparse
Transformers", 2019), or the pages whose keys may fit the query best (`quest`; Tang et al., "Quest:
Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TOKENS = 1 << 24
MAX_PAGES = 1 << 20
_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*")
_BOUNDS = {
    "window": (16, MAX_TOKENS, "tokens"),
    "sinks": (0, MAX_TOKENS, "tokens"),
    "stride": (2, MAX_PAGES, "pages"),
    "quest": (1, MAX_PAGES, "pages"),
}


@dataclass(frozen=True, slots=True)
class SparseRule:
    """What a token reads: the last `window` tokens, itself included, and of the older ones a part.

    That is the first `sinks` tokens, in whole pages; with a `stride` every page whose number it
    divides; with `quest` so many pages of those between, for each query head those whose bound on
    the product of query and key is greatest. With `quest` the window begins with a whole page.
    """

    window: int
    sinks: int = 0
    stride: int = 0
    quest: int = 0


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """A rule and the layers that follow it; none: all that would read everything."""

    rule: SparseRule
    layers: tuple[int, ...] = ()


def parse_sparse_attention(text: str) -> SparseAttention | None:
    """Returns what the setting says; empty: nothing. Raises ValueError that names the part and its bound."""
    if not text.strip():
        return None
    parts: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*_BOUNDS, "layers"):
            raise ValueError(
                f"sparse_attention: {part.strip()[:40]!r} is not one of {', '.join(_BOUNDS)}, layers, with a value"
            )
        if name in parts:
            raise ValueError(f"sparse_attention: {name} is there twice")
        parts[name] = value
    if "window" not in parts:
        raise ValueError("sparse_attention: window is missing: the newest tokens are always read")
    if "stride" in parts and "quest" in parts:
        raise ValueError("sparse_attention: stride and quest exclude each other")
    layers = _layers(parts.pop("layers", ""))
    return SparseAttention(SparseRule(**{name: _number(name, value) for name, value in parts.items()}), layers)


def _number(name: str, value: str) -> int:
    least, most, unit = _BOUNDS[name]
    if not value.isascii() or not value.isdigit() or len(value) > 9 or not least <= int(value) <= most:
        raise ValueError(f"sparse_attention: {name} must be from {least} to {most} {unit}: {value[:40]!r}")
    return int(value)


def _layers(text: str) -> tuple[int, ...]:
    """Returns the numbers of `3+5-8`."""
    if not text:
        return ()
    if not _LAYERS.fullmatch(text) or len(text) > 1000:
        raise ValueError(f"sparse_attention: layers must be numbers and ranges such as 0+4-7: {text[:40]!r}")
    found: set[int] = set()
    for part in text.split("+"):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
