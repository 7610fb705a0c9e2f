"""Which tensor of a GGUF file corresponds to which of a checkpoint, and how their numbers differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.gguf.dialects import Dialect
from ryzanstein.worker.model.refusal import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""The factors of Llama 3's wavelengths; they belong to no tensor of a checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a file, `name`, and the same one of a checkpoint, `source`.

    `heads`: its rows are those of so many heads, reordered. `plus_one`: it is stored with one
    added.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    heads: int | None = None
    plus_one: bool = False

    def rows_of_source(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Returns the checkpoint's row for each row of the file; None: they are the same."""
        if self.heads is None:
            return None
        return np.arange(self.shape[0]).reshape(self.heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def rows_of_file(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Returns the file's row for each row of the checkpoint; None: they are the same."""
        rows = self.rows_of_source()
        return None if rows is None else np.argsort(rows)


def tensor_places(spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], dialect: Dialect) -> list[TensorPlace]:
    """Returns the place of every tensor of a decoder; `shapes` has them by name.

    Raises CheckpointError for one that llama.cpp's files do not have.
    """
    names = dict(_names(spec))
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if dialect.permuted else {}
    places = []
    for source, shape in shapes.items():
        base, _, kind = source.rpartition(".")
        if base not in names:
            raise CheckpointError(f"tensor {source} has no counterpart in a GGUF file of architecture {dialect.name}")
        name = names[base]
        plus_one = dialect.plus_one and kind == "weight" and name.endswith("norm")
        places.append(TensorPlace(f"{name}.{kind}", source, shape, heads.get(name.rpartition(".")[2]), plus_one))
    return places


def _names(spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    """Yields a checkpoint's names with the file's, without `.weight` and `.bias`."""
    names = spec.names
    yield names.embedding, "token_embd"
    yield names.final_norm, "output_norm"
    yield names.head, "output"
    stacked = names.query == names.key
    roles = (
        (names.attention_norm, "attn_norm"),
        (names.query, "attn_qkv" if stacked else "attn_q"),
        (None if stacked else names.key, "attn_k"),
        (None if stacked else names.value, "attn_v"),
        (names.attention_out, "attn_output"),
        (names.query_norm, "attn_q_norm"),
        (names.key_norm, "attn_k_norm"),
        (names.attention_post_norm, "post_attention_norm"),
        (names.mlp_norm, "ffn_norm"),
        (names.mlp_post_norm, "post_ffw_norm"),
        (None if names.gate == names.up else names.gate, "ffn_gate"),
        (names.up, "ffn_up"),
        (names.down, "ffn_down"),
    )
    for layer in range(spec.num_layers):
        prefix = names.layer.format(layer=layer)
        yield from ((f"{prefix}{ours}", f"blk.{layer}.{theirs}") for ours, theirs in roles if ours is not None)
