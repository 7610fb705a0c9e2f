"""Unpacked blocks have the bits that gguf's own code computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ryzanstein.worker.checkpoints.gguf import dequantize
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import BLOCK_TYPES, BlockType

Blocks = Callable[[BlockType, int], np.ndarray[Any, np.dtype[np.uint8]]]
KINDS = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)


@KINDS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the package, where scales are not finite
def test_random_blocks_are_bit_equal_to_ggufs(kind: BlockType, random_blocks: Blocks) -> None:
    blocks = random_blocks(kind, 3000)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name]).reshape(-1)
    numbers = dequantize.dequantize(blocks, kind)
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("scale", [0.0, 5.9604645e-08, -6.1e-05, 65504.0, np.inf, np.nan])
@pytest.mark.parametrize(
    "kind", [block_types.Q8_0, block_types.Q4_0, block_types.Q5_1, block_types.IQ4_NL], ids=lambda kind: kind.name
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extreme_scales_are_bit_equal_to_ggufs(kind: BlockType, scale: float, random_blocks: Blocks) -> None:
    blocks = random_blocks(kind, 64)
    blocks[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name]).reshape(-1)
    assert np.array_equal(dequantize.dequantize(blocks, kind).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_a_tensor_is_unpacked_window_by_window(
    tmp_path: Path, raw: Any, random_blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "_WINDOW_NUMBERS", 200)
    blocks = random_blocks(block_types.Q4_0, 10)
    path = tmp_path / "rows.gguf"
    path.write_bytes(raw.file(tensors=[raw.tensor(b"t", [64, 5], 2, 0)], data=blocks.tobytes() + bytes(12)))
    with GgufFile.open(path) as file:
        windows = list(dequantize.row_windows(file.tensor("t")))
    assert [(first, rows.shape) for first, rows in windows] == [(0, (3, 64)), (3, (2, 64))]
    joined = np.concatenate([rows for _, rows in windows])
    assert np.array_equal(joined.reshape(-1), dequantize.dequantize(blocks, block_types.Q4_0), equal_nan=True)
