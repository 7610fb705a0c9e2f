"""Products of float32 rows with weights in blocks, which stay as the file has them.

Rows are quantized to 8 bits with a scale for each 32 inputs. Sums within such a part are exact, and
parts are added in one order: a row's result does not depend on other rows or on threads. The file's
bytes are packed once for the kernels, in the memory that they take in the file.

Legend: T rows, I inputs, O outputs, B bytes of a row.

Blocks of our own are groups of inputs with a scale and a zero point, as GPTQ and AWQ have. Such a block
is a 16-bit scale and a 16-bit zero point, both float16, then the levels of each 32 inputs: 16 bytes of
4 bits, of which the lower halves are inputs 0 to 15 and the upper ones 16 to 31, or 32 bytes. Levels
are unsigned; a weight is scale * (level - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ryzanstein.worker.kernels.functions.block_types import BlockType
from ryzanstein.worker.kernels.functions.blocks import BLOCKS, BlockFunctions
from ryzanstein.worker.products.native import NativeWeight


def _group(bits: int, inputs: int) -> BlockType:
    name = f"G{bits}_{inputs}"
    return BlockType(name, BLOCKS[name], inputs, 4 + inputs * bits // 8)


G4_32, G4_64, G4_128 = (_group(4, inputs) for inputs in (32, 64, 128))
G8_32, G8_64, G8_128 = (_group(8, inputs) for inputs in (32, 64, 128))

GROUPS = (G4_32, G4_64, G4_128, G8_32, G8_64, G8_128)


_WINDOW_BYTES = 2**24  # of the file that are in memory beside the packed weight


class Blocks(Protocol):
    """A matrix in blocks of one type. Nothing is read before `windows` is called."""

    @property
    def kind(self) -> BlockType: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, count: int) -> Blocks:
        """Returns some rows."""
        ...

    def columns(self, start: int, count: int) -> Blocks | None:
        """Returns some columns, or None if they are not whole blocks."""
        ...

    def windows(self) -> Iterator[Tensor]:
        """Yields the bytes of its rows, some rows at a time, [O, B]."""
        ...


@dataclass(frozen=True, slots=True)
class MappedBlocks:
    """The bytes of a matrix's rows, in the file.

    `order`: its rows are those of the file with these indices. `forget` lets the system drop the
    bytes from this process's memory when they have been packed.
    """

    kind: BlockType
    rows_OB: Tensor
    order: Tensor | None
    forget: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, row_bytes = self.rows_OB.shape
        return num_rows if self.order is None else len(self.order), row_bytes // self.kind.num_bytes * self.kind.numbers

    def rows(self, start: int, count: int) -> MappedBlocks:
        if self.order is not None:
            return replace(self, order=self.order.narrow(0, start, count))
        return replace(self, rows_OB=self.rows_OB.narrow(0, start, count))

    def columns(self, start: int, count: int) -> MappedBlocks | None:
        if start % self.kind.numbers or count % self.kind.numbers:
            return None
        start_bytes, num_bytes = self.kind.row_bytes(start), self.kind.row_bytes(count)
        return replace(self, rows_OB=self.rows_OB.narrow(1, start_bytes, num_bytes))

    def windows(self) -> Iterator[Tensor]:
        num_rows, row_bytes = self.shape[0], self.rows_OB.shape[1]
        step = max(1, _WINDOW_BYTES // row_bytes) if row_bytes else num_rows
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            yield self.rows_OB[rows] if self.order is None else self.rows_OB[self.order[rows]]
            self.forget()


class PackedBlocks:
    """A weight of blocks of one type, packed for the kernels."""

    def __init__(self, functions: BlockFunctions, packed: Tensor, shape: tuple[int, int], kind: BlockType) -> None:
        self.packed, self.shape, self.device = packed, shape, packed.device
        self._functions, self._kind = functions, BLOCKS[kind.name]

    def product(self, bias_O: Tensor | None) -> BlocksProduct:
        return BlocksProduct(self._functions, self.packed, bias_O, self.shape, self._kind)

    def lookup(self, index_T: Tensor) -> Tensor:
        """Returns rows of the weight in float32, [T, I]."""
        return self._functions.rows(self.packed, index_T, self.shape, self._kind)


class BlocksProduct:
    """A product with a weight of packed blocks, plus the bias."""

    def __init__(
        self, functions: BlockFunctions, packed: Tensor, bias_O: Tensor | None, shape: tuple[int, int], kind: int
    ) -> None:
        self._packed, self._bias_O = packed, bias_O
        self._shape, self._kind, self._multiply = shape, kind, functions.product

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, self._packed, self._bias_O, self._shape[0], self._kind)

    def native(self) -> list[NativeWeight]:
        return [NativeWeight("blocks", self._packed, self._shape, self._bias_O, type=self._kind)]


def packed_bytes(functions: BlockFunctions, shape: tuple[int, int], kind: BlockType) -> int:
    """Returns the size of a packed weight."""
    return functions.packed_bytes(*shape, BLOCKS[kind.name])


def pack(functions: BlockFunctions, parts: Sequence[Blocks], num_outputs: int, memory: Tensor) -> PackedBlocks:
    """Packs parts of one type and width into `memory`, zero bytes of `packed_bytes`.

    On the meta device it packs nothing.
    """
    kind, first = parts[0].kind, 0
    num_inputs = parts[0].shape[1]
    for part in parts if memory.device.type != "meta" else ():
        for rows_OB in part.windows():
            functions.pack(rows_OB, memory, first, num_inputs, BLOCKS[kind.name])
            first += len(rows_OB)
    return PackedBlocks(functions, memory, (num_outputs, num_inputs), kind)
