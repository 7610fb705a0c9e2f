"""A tensor of a safetensors file: where it is, and what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor, under the name in its file. It begins `offset` bytes into the file.

    With `columns_of` it is the transpose of every `step`-th column of that matrix from `first_column` on,
    and its own offset has no meaning.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    columns_of: TensorEntry | None = None
    first_column: int = 0
    step: int = 1
