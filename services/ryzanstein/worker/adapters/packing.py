"""An adapter in one file, which every rank maps and takes its part of as views.

The file is a magic number, the length of a table, the table in JSON, then matrices that begin at multiples of 64 bytes: of
each weight A as [inputs, ranks] and B as [ranks, outputs], in float32 or float16. B and the bias are multiplied by the scale of
the adapter: then all of its weights are alike, and of the usual scales, powers of two, the product is exact. In float16 both
matrices are multiplied by powers of two that make their greatest number about 1, so that no number is too large for it and few
are too small; `scale` undoes that. After the last matrix come 64 bytes, because kernels read whole registers.

Legend: I inputs, R ranks, O outputs.
"""

from __future__ import annotations

import json
import mmap
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter
from ryzanstein.worker.adapters.tensors import Floats
from ryzanstein.worker.adapters.unfit import AdapterUnfit

_MAGIC = b"RYZADPT1"
_ALIGNMENT = 64
_LONGEST = 2.0**-126
"""A scale with as many digits in JSON as any has, or more."""


Packed = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The factors of one weight as views of the mapped file: x A B times `scale` is added, and the bias."""

    a_IR: Packed
    b_RO: Packed
    bias_O: Floats | None
    scale: float


def pack(adapter: Adapter, path: Path, *, half: bool = False) -> None:
    """Writes the adapter to `path`, which is complete or not there.

    `half`: in float16, for a model whose own weights are rounded too.
    Raises AdapterUnfit if a scaled factor is too large for float32; OSError.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            write_packed(adapter, file, half=half)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_packed(adapter: Adapter, file: BinaryIO, *, half: bool = False) -> None:
    """Writes the adapter to an empty file. Raises as `pack` does."""
    matrices: list[Packed] = []
    table: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, weight in adapter.weights.items():
        parts: dict[str, Packed] = {**_scaled(name, weight)}
        table[name] = {"half": half, "scale": 1.0}
        if half:
            parts["a"], of_a = _halved(parts["a"])
            parts["b"], of_b = _halved(parts["b"])
            table[name]["scale"] = 2.0 ** -(of_a + of_b)
        for part, matrix in parts.items():
            table[name][part] = {"offset": offset, "shape": matrix.shape}
            matrices.append(matrix)
            offset += _whole(matrix.nbytes)
    _write(file, json.dumps(table).encode(), matrices)


def packed_bytes(adapter: Adapter, *, half: bool = False) -> int:
    """Returns how much memory the file of `pack` takes at most: whole pages."""
    itemsize, offset = 2 if half else 4, 0
    table: dict[str, dict[str, Any]] = {}
    for name, weight in adapter.weights.items():
        table[name] = {"half": half, "scale": _LONGEST}
        for part, matrix in (("a", weight.a_RI.T), ("b", weight.b_OR.T), ("bias", weight.bias_O)):
            if matrix is not None:
                table[name][part] = {"offset": offset, "shape": matrix.shape}
                offset += _whole(matrix.size * (4 if part == "bias" else itemsize))
    num_bytes = _whole(len(_MAGIC) + 8 + len(json.dumps(table))) + offset + _ALIGNMENT
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def open_packed(path: Path) -> Mapping[str, PackedWeight]:
    """Returns the factors in a file of `pack` by the name of the weight. They are mapped: nothing is copied.

    The mapping is private because torch requires writable memory; nothing writes to it. Raises OSError, ValueError.
    """
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if memory[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is no packed adapter")
    begin = len(_MAGIC) + 8
    length = int.from_bytes(memory[len(_MAGIC) : begin], "little")
    table: dict[str, dict[str, Any]] = json.loads(memory[begin : begin + length])
    start = _whole(begin + length)

    def view(place: Mapping[str, Any], kind: type[np.floating[Any]] = np.float32) -> npt.NDArray[Any]:
        shape, offset = tuple(place["shape"]), start + place["offset"]
        return np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)

    def weight(told: Mapping[str, Any]) -> PackedWeight:
        kind = np.float16 if told["half"] else np.float32
        bias_O = view(told["bias"]) if "bias" in told else None
        return PackedWeight(view(told["a"], kind), view(told["b"], kind), bias_O, told["scale"])

    return {name: weight(told) for name, told in table.items()}


def _halved(matrix: Packed) -> tuple[Packed, int]:
    """Returns a matrix in float16, and the power of two that it was multiplied by: its greatest number is then in [0.5, 1)."""
    _, exponent = np.frexp(np.abs(matrix).max(initial=0))
    return np.ldexp(matrix, -int(exponent)).astype(np.float16), -int(exponent)


def _scaled(name: str, weight: AdaptedWeight) -> dict[str, Floats]:
    scale = np.float32(weight.scale)
    with np.errstate(over="ignore"):
        parts = {"a": np.ascontiguousarray(weight.a_RI.T), "b": np.ascontiguousarray(weight.b_OR.T) * scale}
        if weight.bias_O is not None:
            parts["bias"] = weight.bias_O * scale
    if not all(np.isfinite(matrix).all() for matrix in parts.values()):
        raise AdapterUnfit(name, f"times its scale, {weight.scale}, it is too large for float32")
    return parts


def _write(file: BinaryIO, header: bytes, matrices: list[Packed]) -> None:
    file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
    for matrix in matrices:
        file.write(b"\0" * (_whole(file.tell()) - file.tell()))
        file.write(matrix.data)
    file.write(b"\0" * (_whole(file.tell()) - file.tell() + _ALIGNMENT))
    file.flush()


def _whole(number: int) -> int:
    return (number + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
