"""A head that config.json ties to the embedding, and the file stores all the same: transformers 5 then uses the stored one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.tensor_files import TensorEntry

_WINDOW_BYTES = 8 * 2**20


def untied_where_stored(spec: DecoderSpec, entries: Mapping[str, TensorEntry]) -> DecoderSpec:
    """`spec`, with a head of its own where another one than the embedding is stored. Costs a read of both where both are.

    Files are read, not mapped: pages stay in the cache for the weights to come. OSError where that fails.
    """
    embedding, head = (entries.get(f"{name}.weight") for name in (spec.names.embedding, spec.names.head))
    if not spec.tied_head or embedding is None or head is None or _equal(embedding, head):
        return spec
    return replace(spec, tied_head=False)


def _equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether the stored bytes are the same; other bytes may be equal numbers, which a head of its own answers as well."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as one_file, other.file.open("rb") as other_file:
        return all(
            os.pread(one_file.fileno(), count, one.offset + done) == os.pread(other_file.fileno(), count, other.offset + done)
            for done, count in _windows(one.num_bytes)
        )


def _windows(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each begins, and how long it is."""
    return ((done, min(_WINDOW_BYTES, num_bytes - done)) for done in range(0, num_bytes, _WINDOW_BYTES))
