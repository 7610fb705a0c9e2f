"""Packed blocks: the bits of gguf's own code where it has some, and a small error where it has none."""

from typing import Any

import gguf
import numpy as np
import pytest

from ryzanstein.tools.convert.from_checkpoint import WRITTEN
from ryzanstein.tools.convert.quantize import quantize, stored_as
from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import BlockType

Rows = np.ndarray[Any, np.dtype[np.float32]]
NAMES = pytest.mark.parametrize("name", sorted({*WRITTEN, "q5_0"}))


@pytest.fixture(scope="module")
def rows() -> Rows:
    random = np.random.default_rng(3)
    normal = random.standard_normal((48, 512)).astype(np.float32)
    odd = [
        np.zeros((2, 512)),
        np.full((2, 512), -3.5),
        normal[:4] ** 5 * 100,
        normal[:4] * 1e-9,
        random.integers(-1, 2, (4, 512)),
    ]
    return np.concatenate([normal * np.float32(0.02), *odd]).astype(np.float32)


def kind_of(name: str) -> BlockType:
    return {**WRITTEN, "q5_0": block_types.Q5_0}[name]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the package
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_0"])
def test_blocks_are_bit_equal_to_ggufs(name: str, rows: Rows) -> None:
    expected = gguf.quantize(rows, gguf.GGMLQuantizationType[name.upper()])
    assert quantize(rows, kind_of(name)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("name", "most"), [("q4_k", 0.0731), ("q6_k", 0.0181)])
def test_k_quants_are_as_close_as_llama_cpps(name: str, most: float, rows: Rows) -> None:
    """On normal numbers llama.cpp's quantizer has 7.14 and 1.78 % (root mean square over standard deviation)."""
    normal = rows[:48]
    found = dequantize(quantize(normal, kind_of(name)), kind_of(name))
    assert np.sqrt(np.mean((found - normal.reshape(-1)) ** 2)) / normal.std() < most


@NAMES
def test_numbers_that_blocks_can_have_are_kept(name: str, rows: Rows) -> None:
    """Unpacked blocks, packed again, are about the same numbers: a second conversion loses little more."""
    kind = kind_of(name)
    once = dequantize(quantize(rows[:48], kind), kind)
    twice = dequantize(quantize(once.reshape(48, -1), kind), kind)
    assert np.abs(twice - once).max() <= 0.002 * np.abs(once).max() + 0.02 * once.std()


@NAMES
def test_zeros_stay_zero(name: str) -> None:
    kind = kind_of(name)
    assert not dequantize(quantize(np.zeros((2, 256), np.float32), kind), kind).any()


@pytest.mark.filterwarnings("error")
@NAMES
def test_tiny_numbers_neither_warn_nor_grow(name: str, rows: Rows) -> None:
    tiny, kind = rows * np.float32(1e-30), kind_of(name)
    assert np.abs(dequantize(quantize(tiny, kind), kind)).max() <= 2 * np.abs(tiny).max()


@pytest.mark.parametrize(
    ("wanted", "row", "stored"),
    [("q4_k", 512, "Q4_K"), ("q4_k", 640, "Q5_0"), ("q6_k", 640, "Q8_0"), ("q4_k", 100, "F16"), ("q8_0", 100, "F16")],
)
def test_rows_that_are_not_whole_blocks_get_the_type_that_llama_cpp_gives_them(wanted: str, row: int, stored: str) -> None:
    assert stored_as(WRITTEN[wanted], row).name == stored
