"""Reading GGUF files: what gguf's own writer makes, and what somebody broke or meant to break."""

import contextlib
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ryzanstein.worker.checkpoints.gguf import header
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions.block_types import BLOCK_TYPES, UNREAD
from ryzanstein.worker.refusal import MAX_MESSAGE_CHARS, CheckpointError, ModelRefused

WITHIN_S = 10.0
"""Two seconds are meant; a machine that runs other tests as well takes longer."""
STRING, ARRAY, UINT32, UINT64, BOOL = 8, 9, 4, 10, 7
F32, Q4_0 = 0, 2


def test_a_file_of_ggufs_writer_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "naïve ▁")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.add_array("a.numbers", [1, -2, 3])
    matrix = np.arange(64 * 3, dtype=np.float32).reshape(3, 64)
    writer.add_tensor("first", matrix)
    quantized = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("second", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with GgufFile.open(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert [file.metadata[f"a.{key}"] for key in ("text", "count", "float", "flag")] == ["naïve ▁", 7, 0.5, True]
        assert file.metadata["a.texts"] == ("x", "", "yz")
        assert np.asarray(file.metadata["a.numbers"]).tolist() == [1, -2, 3]
        first, second = file.tensor("first"), file.tensor("second")
        assert (first.type.name, first.shape, second.type.name, second.shape) == ("F32", (3, 64), "Q8_0", (3, 64))
        assert np.array_equal(np.frombuffer(first.blocks, np.float32).reshape(3, 64), matrix)
        assert bytes(second.rows(1, 2)) == quantized[1:3].tobytes()
        assert second.num_rows == 3


def test_sizes_and_ids_of_all_types_are_those_of_ggml() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind.id: (kind.name, kind.numbers, kind.num_bytes) for kind in BLOCK_TYPES.values()}.items() <= sizes.items()
    assert {kind: sizes[kind][0] for kind in UNREAD} == UNREAD


def test_blocks_outlive_the_file(tmp_path: Path, raw: Any) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(raw.file(tensors=[raw.tensor(b"t", [4], F32, 0)], data=struct.pack("<4f", 1, 2, 3, 4)))
    with GgufFile.open(path) as file:
        numbers = np.frombuffer(file.tensor("t").blocks, np.float32)
    assert numbers.tolist() == [1, 2, 3, 4]


HOSTILE: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "empty": (lambda raw: b"", "cannot mmap an empty file"),
    "magic": (lambda raw: raw.file(magic=b"GGML"), "not a GGUF file: begins with b'GGML'"),
    "version 1": (lambda raw: raw.file(version=1), "GGUF version 1 is not supported, only 2 and 3"),
    "version 4": (lambda raw: raw.file(version=4), "GGUF version 4 is not supported"),
    "big-endian": (lambda raw: raw.file(version=3 << 24), "or the file is big-endian"),
    "truncated counts": (lambda raw: raw.file()[:12], "truncated in the number of tensors"),
    "tensors": (lambda raw: raw.file(counts=(2**63, 0)), f"the number of tensors is {2**63}, more than {header.MAX_TENSORS}"),
    "entries": (lambda raw: raw.file(counts=(0, 10**9)), f"metadata entries is 1000000000, more than {header.MAX_ENTRIES}"),
    "missing tensors": (lambda raw: raw.file(counts=(5, 0)), "truncated in the dimensions of tensor"),
    "10^9 tokens": (
        lambda raw: raw.file([raw.entry(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 10**9))]),
        f"the length of metadata 'tokenizer.ggml.tokens' is 1000000000, more than {header.MAX_ITEMS}",
    ),
    "tokens that are not there": (
        lambda raw: raw.file([raw.entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2**20))]),
        "truncated in metadata 'k': it has 1048576 items, the file ends in item",
    ),
    "numbers that are not there": (
        lambda raw: raw.file([raw.entry(b"k", ARRAY, struct.pack("<IQ", UINT64, 2**20))]),
        "truncated in metadata 'k': it has 8388608 bytes",
    ),
    "many arrays": (
        lambda raw: raw.file([raw.entry(b"%d" % i, ARRAY, struct.pack("<IQ", 0, 2**20) + bytes(2**20)) for i in range(3)]),
        "all arrays together must have at most",
    ),
    "array of arrays": (
        lambda raw: raw.file([raw.entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))]),
        "metadata 'k' is an array of arrays",
    ),
    "a long text": (
        lambda raw: raw.file([raw.entry(b"k", STRING, struct.pack("<Q", 2**60))]),
        f"the length of metadata 'k' is {2**60}, more than {header.MAX_STRING_BYTES}",
    ),
    "a long key": (lambda raw: raw.file([raw.entry(b"k" * 300, UINT32, bytes(4))]), "the length of a metadata key is 300"),
    "unknown value": (lambda raw: raw.file([raw.entry(b"k", 77, bytes(8))]), "metadata 'k' is type 77"),
    "neither true nor false": (lambda raw: raw.file([raw.entry(b"k", BOOL, b"\2")]), "neither 0 nor 1"),
    "not UTF-8": (lambda raw: raw.file([raw.entry(b"k", STRING, raw.string(b"\xff"))]), "metadata 'k' is not UTF-8"),
    "an item not UTF-8": (
        lambda raw: raw.file([raw.entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2) + raw.string(b"a") + raw.string(b"\xff"))]),
        "item 1 of metadata 'k' is not UTF-8",
    ),
    "a key twice": (lambda raw: raw.file([raw.entry(b"k", UINT32, bytes(4))] * 2), "metadata 'k' occurs twice"),
    "a tensor twice": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [8], F32, 0), raw.tensor(b"t", [8], F32, 32)], data=bytes(64)),
        "tensor 't' occurs twice",
    ),
    "alignment": (
        lambda raw: raw.file([raw.entry(b"general.alignment", UINT32, struct.pack("<I", 48))]),
        "general.alignment must be a power of two",
    ),
    "alignment of nothing": (
        lambda raw: raw.file([raw.entry(b"general.alignment", UINT32, bytes(4))]),
        "general.alignment must be a power of two",
    ),
    "unaligned": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [8], F32, 4)], data=bytes(64)),
        "begins at byte 4 of the data, which is not a multiple of the alignment 32",
    ),
    "overlapping": (
        lambda raw: raw.file(tensors=[raw.tensor(b"a", [16], F32, 0), raw.tensor(b"b", [8], F32, 32)], data=bytes(64)),
        "tensor 'b' begins at byte 32, before 'a' ends (64)",
    ),
    "truncated data": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [64], F32, 0)], data=bytes(64)),
        "truncated in tensor 't': it ends at byte 256 of the data, which has 64",
    ),
    "far away": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [8], F32, 2**63)], data=bytes(64)),
        "truncated in tensor 't'",
    ),
    "huge": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [2**62, 2**62, 2**62, 2**62], F32, 0)]),
        "which a file of",
    ),
    "of nothing": (lambda raw: raw.file(tensors=[raw.tensor(b"t", [0, 8], F32, 0)], data=bytes(64)), "which a file of"),
    "dimensions": (lambda raw: raw.file(tensors=[raw.tensor(b"t", [1] * 9, F32, 0)]), "has 9 dimensions, must be 1 to 4"),
    "no dimensions": (lambda raw: raw.file(tensors=[raw.tensor(b"t", [], F32, 0)]), "has 0 dimensions, must be 1 to 4"),
    "unknown type": (lambda raw: raw.file(tensors=[raw.tensor(b"t", [32], 99, 0)]), "tensor 't' has type 99"),
    "unread type": (lambda raw: raw.file(tensors=[raw.tensor(b"t", [256], 19, 0)]), "tensor 't' has type IQ1_S"),
    "part of a block": (
        lambda raw: raw.file(tensors=[raw.tensor(b"t", [40], Q4_0, 0)], data=bytes(64)),
        "has rows of 40 numbers, Q4_0 requires a multiple of 32",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_soon_with_the_field_and_its_bound(case: str, tmp_path: Path, raw: Any) -> None:
    make, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(make(raw))
    began = time.monotonic()
    with pytest.raises(ModelRefused) as refusal:
        GgufFile.open(path)
    assert str(refusal.value).startswith(str(path))
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) <= MAX_MESSAGE_CHARS
    assert time.monotonic() - began < WITHIN_S


def test_every_truncation_of_a_sound_file_is_refused(tmp_path: Path, raw: Any) -> None:
    entries = [raw.entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2) + raw.string(b"ab") + raw.string(b"c"))]
    content = raw.file(entries, [raw.tensor(b"t", [8, 2], F32, 0)], bytes(64))
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    GgufFile.open(path).close()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelRefused):
            GgufFile.open(path)


def test_random_damage_is_refused_or_read_but_nothing_else(tmp_path: Path, raw: Any) -> None:
    entries = [raw.entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2) + raw.string(b"ab") + raw.string(b"c"))]
    content = raw.file(entries, [raw.tensor(b"t", [8, 2], F32, 0), raw.tensor(b"u", [32], Q4_0, 64)], bytes(96))
    path, random, num_read = tmp_path / "damaged.gguf", np.random.default_rng(5), 0
    for _ in range(500):
        damaged = bytearray(content)
        for place in random.integers(0, len(content) - 96, 3):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(ModelRefused):
            GgufFile.open(path).close()
            num_read += 1
    assert 0 < num_read < 500, "one of the two never happened: the test shows little"


@pytest.mark.parametrize("kind", ["directory", "missing", "pipe"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ModelRefused, match=r"odd\.gguf"):
        GgufFile.open(path)


def test_a_part_of_a_split_file_is_refused_with_what_joins_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is part 2 of 3 .*llama-gguf-split --merge"):
        GgufFile.open(path)


def test_a_pointer_of_git_lfs_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`"):
        GgufFile.open(path)
