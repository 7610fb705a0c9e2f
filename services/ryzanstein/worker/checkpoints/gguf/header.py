"""The header of a GGUF file, parsed from its bytes: untrusted, so each number is checked before it is used.

Nothing is allocated by a number that the file claims, only by bytes that the file has. Counts and
lengths have the bounds below as well, so that a header of any content takes at most about a second.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from ryzanstein.worker.kernels.functions.block_types import BLOCK_TYPES, UNREAD, BlockType
from ryzanstein.worker.refusal import CheckpointError, excerpt

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_TENSORS = 2**14
MAX_ENTRIES = 2**12
MAX_NAME_BYTES = 255
"""A name of a tensor has at most 63 bytes in llama.cpp; a key has words with dots between them."""
MAX_STRING_BYTES = 2**24
MAX_ITEMS = 2**21
"""The most items in all arrays of a header. Texts count twice, as they take most of the time.

The largest known vocabularies have 262,144 entries, that is 1.6 million items with as many merges.
"""
MAX_DIMENSIONS = 4

Value = bool | int | float | str | tuple[str, ...] | np.ndarray[Any, np.dtype[Any]]
"""A value of the metadata. An array of numbers is a read-only numpy array, one of strings a tuple."""

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy's names for the types of single values, by GGUF's ids."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """What the header says of a tensor. `shape` has the rows first, as in torch; ggml has it reversed."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.type.row_bytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. The tensors' data begin `data_start` bytes into the file."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorHead]
    alignment: int
    data_start: int


def parse(content: memoryview, file: str) -> Header:
    """Returns the header at the beginning of `content`, the bytes of the whole file.

    Raises CheckpointError, which names `file`, the field and its bound.
    """
    return _Parser(content, file).header()


@dataclass(slots=True)
class _Parser:
    """A position in the bytes of a header."""

    content: memoryview
    file: str
    _at: int = 0
    _items: int = 0

    def header(self) -> Header:
        version = self._version()
        num_tensors = self._count("the number of tensors", MAX_TENSORS)
        num_entries = self._count("the number of metadata entries", MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                self.refuse(f"metadata {excerpt(key)} occurs twice")
            metadata[key] = self._value(f"metadata {excerpt(key)}")
        alignment = self._alignment(metadata)
        tensors: dict[str, TensorHead] = {}
        for _ in range(num_tensors):
            tensor = self._tensor(alignment)
            if tensor.name in tensors:
                self.refuse(f"tensor {excerpt(tensor.name)} occurs twice")
            tensors[tensor.name] = tensor
        data_start = -(-self._at // alignment) * alignment
        self._check_places(tensors, data_start)
        return Header(version, metadata, tensors, alignment, data_start)

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {what}")

    def _version(self) -> int:
        magic = bytes(self.content[:4])
        if magic != MAGIC:
            self.refuse(f"not a GGUF file: begins with {magic!r}, not {MAGIC!r}")
        self._at = 4
        version = int(self._number("<I", "the version"))
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = ", or the file is big-endian" if swapped in VERSIONS else ""
            self.refuse(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}{order}")
        return version

    def _number(self, code: str, what: str) -> Any:
        start = self._skip(struct.calcsize(code), what)
        return struct.unpack_from(code, self.content, start)[0]

    def _skip(self, num_bytes: int, what: str) -> int:
        """Returns where the next `num_bytes` begin, and goes behind them."""
        start, left = self._at, len(self.content) - self._at
        if num_bytes > left:
            self.refuse(f"truncated in {what}: it has {excerpt(num_bytes)} bytes, the file {left} more")
        self._at += num_bytes
        return start

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("<Q", what))
        if count > most:
            self.refuse(f"{what} is {count}, more than {most}")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._count(f"the length of {what}", most)
        start = self._skip(length, what)
        try:
            return str(self.content[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error.reason} at byte {error.start}")

    def _value(self, what: str) -> Value:
        kind = self._number("<I", f"the type of {what}")
        if kind == STRING:
            return self._string(what, MAX_STRING_BYTES)
        if kind == ARRAY:
            return self._array(what)
        item: bool | int | float = self._numbers(kind, 1, what)[0].item()
        return item

    def _array(self, what: str) -> Value:
        kind = self._number("<I", f"the item type of {what}")
        count = self._count(f"the length of {what}", MAX_ITEMS)
        self._items += 2 * count if kind == STRING else count
        if self._items > MAX_ITEMS:
            self.refuse(f"{what} has {count} items; all arrays together must have at most {MAX_ITEMS}, texts count twice")
        return self._strings(count, what) if kind == STRING else self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray[Any, np.dtype[Any]]:
        if kind not in SCALARS:
            nested = "an array of arrays" if kind == ARRAY else f"type {kind}"
            self.refuse(f"{what} is {nested}, which is not supported")
        dtype = np.dtype(SCALARS[kind])
        start = self._skip(count * dtype.itemsize, what)
        stored = bytes(self.content[start : self._at])
        if kind == 7 and stored.strip(b"\0\1"):
            self.refuse(f"{what} is a truth value that is neither 0 nor 1")
        return np.frombuffer(stored, dtype)

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        """Returns an array of strings; its loop is most of the time that a header takes."""
        content, size, at = self.content, len(self.content), self._at
        length_of = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                (length,) = length_of(content, at)
                at += 8 + length
                if at > size:
                    break
                found.append(str(content[at - length : at], "utf-8"))
        except struct.error:
            pass
        except UnicodeDecodeError as error:
            self.refuse(f"item {len(found)} of {what} is not UTF-8: {error.reason} at byte {error.start}")
        if len(found) < count:
            self.refuse(f"truncated in {what}: it has {count} items, the file ends in item {len(found)}")
        self._at = at
        return tuple(found)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.refuse(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {excerpt(value)}")
        return value

    def _tensor(self, alignment: int) -> TensorHead:
        name = self._string("the name of a tensor", MAX_NAME_BYTES)
        what = f"tensor {excerpt(name)}"
        num_dimensions = self._number("<I", f"the dimensions of {what}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.refuse(f"{what} has {num_dimensions} dimensions, must be 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("<Q", f"the dimensions of {what}") for _ in range(num_dimensions))[::-1]
        kind = self._type(self._number("<I", f"the type of {what}"), what)
        if not all(shape) or math.prod(shape) > 8 * len(self.content):
            # No type stores a number in less than an eighth of a byte.
            self.refuse(f"{what} has shape {excerpt(list(shape))}, which a file of {len(self.content)} bytes cannot contain")
        if shape[-1] % kind.numbers:
            self.refuse(f"{what} has rows of {shape[-1]} numbers, {kind.name} requires a multiple of {kind.numbers}")
        offset = self._number("<Q", f"the offset of {what}")
        if offset % alignment:
            self.refuse(f"{what} begins at byte {offset} of the data, which is not a multiple of the alignment {alignment}")
        return TensorHead(name, kind, shape, offset)

    def _type(self, kind: int, what: str) -> BlockType:
        if kind not in BLOCK_TYPES:
            self.refuse(f"{what} has type {UNREAD.get(kind, kind)}, which is not supported")
        return BLOCK_TYPES[kind]

    def _check_places(self, tensors: Mapping[str, TensorHead], data_start: int) -> None:
        """Refuses tensors that overlap or end behind the file."""
        data_bytes, end = max(0, len(self.content) - data_start), 0
        before = ""
        for tensor in sorted(tensors.values(), key=attrgetter("offset")):
            if tensor.offset < end:
                self.refuse(
                    f"tensor {excerpt(tensor.name)} begins at byte {tensor.offset}, before {excerpt(before)} ends ({end})"
                )
            end, before = tensor.offset + tensor.num_bytes, tensor.name
            if end > data_bytes:
                self.refuse(f"truncated in tensor {excerpt(before)}: it ends at byte {end} of the data, which has {data_bytes}")
