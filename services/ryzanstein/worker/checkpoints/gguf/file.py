"""A GGUF file that is open for reading: its metadata, and its tensors as they are stored.

The file is mapped. A page of it takes memory when it is read, and the system can drop it again.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ryzanstein.worker.checkpoints.gguf import header
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.json_files import MAX_POINTER_BYTES, UnreadableFile, open_regular, refuse_pointer
from ryzanstein.worker.kernels.functions.block_types import BlockType
from ryzanstein.worker.refusal import CheckpointError, excerpt


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as it is stored.

    `shape` has the rows first, as in torch. `blocks` are its bytes in the file, row after row, not
    copied: they are mapped as long as something refers to them. They begin `offset` bytes into the
    file, at a multiple of its alignment.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    blocks: memoryview

    @property
    def row_bytes(self) -> int:
        """The bytes of one row; a row is the last dimension."""
        return self.type.row_bytes(self.shape[-1])

    @property
    def num_rows(self) -> int:
        return len(self.blocks) // self.row_bytes

    def rows(self, first: int, count: int) -> memoryview:
        """Returns the blocks of `count` rows from `first` on."""
        if not 0 <= first <= first + count <= self.num_rows:
            raise ValueError(f"tensor {self.name} has {self.num_rows} rows, not {count} from {first} on")
        return self.blocks[first * self.row_bytes : (first + count) * self.row_bytes]


class GgufFile:
    """An open file, checked as a whole before anything is used. It is a context manager.

    `metadata` has every value by its key, `tensors` every tensor by its name, in the file's order.
    """

    def __init__(self, path: Path, mapping: mmap.mmap | None, parsed: header.Header) -> None:
        self.path, self.version, self.alignment = path, parsed.version, parsed.alignment
        self.metadata: Mapping[str, Value] = parsed.metadata
        self._mapping = mapping
        content = memoryview(mapping or b"")
        self.tensors: Mapping[str, GgufTensor] = {
            name: _placed(head, content, parsed.data_start) for name, head in parsed.tensors.items()
        }

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """Maps a file and checks it.

        Raises CheckpointError, a ModelRefused, which names the file, the field and its bound.
        """
        path = Path(path)
        try:
            with open_regular(path) as file:
                # mmap refuses an empty file with a ValueError.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                refuse_pointer(mapping[:MAX_POINTER_BYTES])
        except (UnreadableFile, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            with memoryview(mapping) as content:
                parsed = header.parse(content, str(path))
            _refuse_part(parsed.metadata, path)
        except BaseException:
            mapping.close()
            raise
        return cls(path, mapping, parsed)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the file. It stays mapped while there are blocks, or arrays made of them."""
        self.tensors, self._mapping = {}, None

    def tensor(self, name: str) -> GgufTensor:
        """Returns a tensor. Raises CheckpointError if there is none of this name."""
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self.path}: tensor {excerpt(name)} is missing")
        return found

    def will_need(self, tensor: GgufTensor) -> None:
        """Lets the system read a tensor ahead."""
        self._advise(tensor, mmap.MADV_WILLNEED)

    def forget(self, tensor: GgufTensor, start: int = 0, num_bytes: int | None = None) -> None:
        """Lets the system drop the pages of a tensor from this process's memory; they can be read again.

        Of the tensor's bytes those from `start` on, `num_bytes` of them or all.
        """
        self._advise(tensor, mmap.MADV_DONTNEED, start, num_bytes)

    def _advise(self, tensor: GgufTensor, advice: int, start: int = 0, num_bytes: int | None = None) -> None:
        if self._mapping is None:
            return
        begin = tensor.offset + start
        end = tensor.offset + len(tensor.blocks) if num_bytes is None else begin + num_bytes
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(advice, page, end - page)


def _refuse_part(metadata: Mapping[str, Value], path: Path) -> None:
    """Raises CheckpointError for a part of a file that was split: the other tensors are in its other parts."""
    count, number = metadata.get("split.count"), metadata.get("split.no")
    if isinstance(count, int) and count > 1:
        part = f"part {number + 1} of {count}" if isinstance(number, int) else f"one of {count} parts"
        raise CheckpointError(f"{path} is {part} of a split file: join them with llama.cpp's llama-gguf-split --merge")


def _placed(head: header.TensorHead, content: memoryview, data_start: int) -> GgufTensor:
    start = data_start + head.offset
    return GgufTensor(head.name, head.type, head.shape, start, content[start : start + head.num_bytes])
