"""The stored layouts, against the libraries that read them."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from ryzanstein.tools.quantize.methods.grids import Grid, fitted
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme, packed, packed_ternary, restored, stored


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (32, 64), (3, 7)])
def test_levels_are_packed_as_compressed_tensors_packs_them(bits: int, shape: tuple[int, int]) -> None:
    levels_OI = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=torch.int8)
    words = packed(levels_OI, bits)
    assert torch.equal(unpack_from_int32(words, bits, torch.Size(shape)), levels_OI)
    if shape[1] % (32 // bits) == 0:  # the library fills up with other bits, which nobody reads
        assert torch.equal(words, pack_to_int32(levels_OI, bits))


@pytest.mark.parametrize("num_outputs", [8, 13])
@pytest.mark.parametrize("zero_points", [False, True])
def test_a_matrix_is_restored(num_outputs: int, zero_points: bool) -> None:
    scheme = LayoutScheme(Grid(4, 16, zero_points))
    matrix = fitted(torch.randn(num_outputs, 64) + 1, scheme.grid)
    tensors = stored("module", matrix, scheme)
    assert torch.equal(restored("module", tensors, scheme).floats(), matrix.floats())
    assert sum(tensor.nbytes for name, tensor in tensors.items() if "shape" not in name) == pytest.approx(
        scheme.num_bytes(num_outputs, 64), abs=64
    )
    if zero_points:
        zeros = unpack_from_int32(tensors["module.weight_zero_point"], 4, torch.Size((num_outputs, 4)), packed_dim=0)
        assert torch.equal(zeros, matrix.zero_OG)


def test_ternary_levels_are_packed_as_transformers_packs_them() -> None:
    """The example in the documentation of its `unpack_weights`."""
    levels_OI = torch.tensor([[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]], dtype=torch.int8)
    expected = torch.tensor([[0b10100001, 0b00011000], [0b10010000, 0b00001010]], dtype=torch.uint8)
    assert torch.equal(packed_ternary(levels_OI), expected)
