"""Heads that are tied in config.json but stored in the file: beside the embedding, where transformers 5 uses
the stored one, or in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry

_WINDOW_BYTES = 8 * 2**20


def untied_where_stored(spec: DecoderSpec, entries: Mapping[str, TensorEntry]) -> DecoderSpec:
    """Returns `spec`, with an untied head if the stored head differs from the embedding.

    If both are stored, both are read. Files are read, not mapped: their pages stay in the page
    cache for the loading that follows. Raises OSError.
    """
    embedding, head = (entries.get(f"{name}.weight") for name in (spec.names.embedding, spec.names.head))
    if not spec.tied_head or embedding is None or head is None or _equal(embedding, head):
        return spec
    return replace(spec, tied_head=False)


def with_embedding(spec: DecoderSpec, entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Returns the entries with the embedding's name, of a tied pair that is stored under the head's name alone."""
    embedding, head = f"{spec.names.embedding}.weight", f"{spec.names.head}.weight"
    if not spec.tied_head or embedding in entries or head not in entries:
        return entries
    return {embedding if name == head else name: entry for name, entry in entries.items()}


def _equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Returns whether the stored bytes are the same.

    Different bytes may still be equal numbers; an untied head gives the right result for them too.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as one_file, other.file.open("rb") as other_file:
        return all(
            os.pread(one_file.fileno(), count, one.offset + done) == os.pread(other_file.fileno(), count, other.offset + done)
            for done, count in _windows(one.num_bytes)
        )


def _windows(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Returns the start and the length of each window."""
    return ((done, min(_WINDOW_BYTES, num_bytes - done)) for done in range(0, num_bytes, _WINDOW_BYTES))
