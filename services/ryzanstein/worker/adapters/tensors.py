"""Tensors of an adapter's safetensors file as float32, without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry

Floats = npt.NDArray[np.float32]
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_floats(entry: TensorEntry) -> Floats:
    """Returns a tensor's numbers. Raises AdapterUnfit if it is of another kind, or some are not finite; OSError."""
    stored = stored_numbers(entry)
    numbers = widened(stored) if entry.dtype == "BF16" else stored.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise AdapterUnfit(entry.name, "has numbers that are not finite")
    return numbers


def stored_numbers(entry: TensorEntry) -> npt.NDArray[np.generic]:
    """Returns the numbers as they are stored: of bfloat16 their bits."""
    if entry.dtype not in _DTYPES:
        raise AdapterUnfit(entry.name, f"has dtype {entry.dtype}, which is not supported")
    kind = np.dtype(_DTYPES[entry.dtype]).newbyteorder("<")
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        content = file.read(entry.num_bytes)
    if len(content) != entry.num_bytes:
        raise AdapterUnfit(entry.name, f"{entry.file.name} was truncated while it was read")
    return np.frombuffer(content, kind).reshape(entry.shape)


def widened(bits: npt.NDArray[np.generic]) -> Floats:
    """Returns float32 numbers of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
