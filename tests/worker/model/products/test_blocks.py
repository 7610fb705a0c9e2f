"""Products with blocks against float64: every type, any number of rows, any neighbours, slices, broken numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.kernels.functions.block_types import BLOCK_TYPES, MXFP4, BlockType
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import blocks as products_of_blocks
from ryzanstein.worker.products.blocks import GROUPS, Blocks, BlocksProduct, MappedBlocks, PackedBlocks, pack, packed_bytes

TYPES = [*(kind for kind in BLOCK_TYPES.values() if kind.name in BLOCKS), *GROUPS]
TWO_SCALES = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
SCALE_LAST = ("Q6_K", "TQ2_0")
SHAPES = [(5, 256), (33, 768), (130, 512)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 32, 100)
EPS = torch.finfo(torch.float32).eps

every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


def stored(kind: BlockType, seed: int, num_outputs: int, num_inputs: int) -> Tensor:
    """Random bytes of rows: any levels and any small scales, and 16-bit scales of 0.001 to 0.01, of both signs.

    Zero points are between the levels and beyond them, some of them not whole.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // kind.numbers, kind.num_bytes), dtype=np.uint8)
    num_scales = 2 if kind.name in TWO_SCALES else 1
    scales = rng.uniform(0.001, 0.01, (*blocks.shape[:2], num_scales)) * rng.choice([-1, 1], (*blocks.shape[:2], num_scales))
    if kind is MXFP4:
        blocks[:, :, 0] = rng.integers(117, 121, blocks.shape[:2])  # powers of two: half of them, 0.0005 to 0.004
        return torch.from_numpy(blocks.reshape(num_outputs, kind.row_bytes(num_inputs)))
    place = scale_place(kind)
    blocks[:, :, place : place + 2 * num_scales] = scales.astype(np.float16).view(np.uint8)
    if kind in GROUPS:
        zeros = rng.uniform(-1, 1.1 * largest_level(kind), (*blocks.shape[:2], 1))
        blocks[:, :, 2:4] = np.where(rng.random(zeros.shape) < 0.5, zeros, zeros.round()).astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_outputs, kind.row_bytes(num_inputs)))


def scale_place(kind: BlockType) -> int:
    """The first byte of a block's 16-bit scale."""
    return kind.num_bytes - 2 if kind.name in SCALE_LAST else 0


def largest_level(kind: BlockType) -> int:
    """Of a type of groups."""
    return 15 if kind.name.startswith("G4") else 255


def blocks_of(kind: BlockType, rows_OB: Tensor, order: Tensor | None = None) -> Blocks:
    return MappedBlocks(kind, rows_OB, order, lambda: None)


def floats(kind: BlockType, rows_OB: Tensor) -> Tensor:
    """What ggml makes of the bytes, and the definition of groups."""
    if kind in GROUPS:
        return group_floats(kind, rows_OB)
    return torch.from_numpy(dequantize(rows_OB.numpy().reshape(-1), kind).reshape(len(rows_OB), -1).copy())


def group_floats(kind: BlockType, rows_OB: Tensor) -> Tensor:
    """scale * (level - zero), each operation in float32."""
    blocks = rows_OB.numpy().reshape(-1, kind.num_bytes)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    levels = blocks[:, 4:]
    if kind.name.startswith("G4"):
        parts = levels.reshape(len(blocks), -1, 16)
        levels = np.concatenate([parts & 15, parts >> 4], axis=-1).reshape(len(blocks), -1)
    with np.errstate(all="ignore"):
        numbers = scales[:, :1] * (levels.astype(np.float32) - scales[:, 1:])
    return torch.from_numpy(numbers.reshape(len(rows_OB), -1))


def packed(native: NativeKernels, *parts: Blocks, num_outputs: int | None = None) -> PackedBlocks:
    num_outputs = num_outputs or sum(part.shape[0] for part in parts)
    size = packed_bytes(native.blocks, (num_outputs, parts[0].shape[1]), parts[0].kind)
    return pack(native.blocks, parts, num_outputs, torch.zeros(size, dtype=torch.uint8))


def product(native: NativeKernels, kind: BlockType, rows_OB: Tensor, bias_O: Tensor | None = None) -> BlocksProduct:
    return packed(native, blocks_of(kind, rows_OB)).product(bias_O)


def rounded(x_TI: Tensor) -> Tensor:
    """Rows as the kernels see them: levels of -127 to 127 for each 32 inputs, times a scale; in float64."""
    parts = x_TI.reshape(len(x_TI), -1, 32)
    scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((parts * (1 / scale)).round().double() * scale.double()).reshape(x_TI.shape)


@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_are_looked_up_have_the_bits_of_ggml(kernels: NativeKernels, kind: BlockType, shape: tuple[int, int]) -> None:
    rows_OB = stored(kind, 1, *shape)
    index_T = torch.randint(0, shape[0], (40,), generator=torch.Generator().manual_seed(2))
    found_TI = packed(kernels, blocks_of(kind, rows_OB)).lookup(index_T)
    assert torch.equal(found_TI.view(torch.int32), floats(kind, rows_OB)[index_T].view(torch.int32))


@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_rows_are_rounded(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType, shape: tuple[int, int]
) -> None:
    """The rest is float32: a few roundings for each part of 32 inputs, of the sizes that are added."""
    rows_OB, bias_O = stored(kind, 3, *shape), normal(4, shape[0])
    weight_OI = floats(kind, rows_OB).double()
    for rows in ROWS:
        x_TI = normal(rows, rows, shape[1])
        exact_TO = rounded(x_TI) @ weight_OI.t()
        # A shift may cancel what the levels give: their sizes count, not that of the difference.
        sizes_TO = rounded(x_TI).abs() @ (weight_OI.abs() + 2 * weight_OI.abs().amax(1, keepdim=True)).t()
        for bias, expected_TO in ((None, exact_TO), (bias_O, exact_TO + bias_O.double())):
            error_TO = (product(kernels, kind, rows_OB, bias)(x_TI).double() - expected_TO).abs()
            assert (error_TO <= 8 * EPS * (sizes_TO + expected_TO.abs())).all()


@every_type
def test_the_error_stays_within_what_rounding_rows_can_do(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType
) -> None:
    """Half a step of each part's largest / 127, times the sizes of the weights."""
    rows_OB, x_TI = stored(kind, 5, 70, 1024), normal(6, 20, 1024)
    weight_OI = floats(kind, rows_OB).double()
    steps_TP = x_TI.reshape(20, -1, 32).abs().amax(-1).double() / 254
    bound_TO = steps_TP @ weight_OI.abs().reshape(70, -1, 32).sum(-1).t()
    exact_TO = x_TI.double() @ weight_OI.t()
    error_TO = (product(kernels, kind, rows_OB)(x_TI).double() - exact_TO).abs()
    assert (error_TO <= bound_TO * 1.001).all()
    assert error_TO.norm() < 0.01 * exact_TO.norm()


def largest_levels(kind: BlockType, num_outputs: int, num_inputs: int) -> Tensor:
    """Blocks whose bits are all set, but for the 16-bit scales, which are 1, and the shift or zero point, which is 0."""
    blocks = np.full((num_outputs, num_inputs // kind.numbers, kind.num_bytes), 0xFF, np.uint8)
    one, zero = np.float16(1).tobytes(), np.float16(0).tobytes()
    place = scale_place(kind)
    scales = one + zero if kind.name in TWO_SCALES or kind in GROUPS else one
    blocks[:, :, place : place + len(scales)] = np.frombuffer(scales, np.uint8)
    if kind.name == "Q8_0":
        blocks[:, :, 2:] = 0x7F
        blocks[::2, :, 2:] = 0x80
    return torch.from_numpy(blocks.reshape(num_outputs, kind.row_bytes(num_inputs)))


@every_type
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_levels_do_not_overflow(kernels: NativeKernels, kind: BlockType, sign: int) -> None:
    """Rows of 127 have a scale of 1: everything is a whole number that float32 holds."""
    rows_OB = largest_levels(kind, 20, 256)
    expected_O = sign * 127.0 * floats(kind, rows_OB).sum(1)
    for rows in ROWS:
        product_TO = product(kernels, kind, rows_OB)(torch.full((rows, 256), 127.0 * sign))
        assert torch.equal(product_TO, expected_O.expand(rows, 20))


@every_type
def test_a_row_does_not_depend_on_its_neighbours(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType
) -> None:
    """Alone, at every place of a batch, beside a row a million times as loud and beside one that is not finite."""
    row_1I, multiply = normal(7, 1, 512), product(kernels, kind, stored(kind, 8, 130, 512), normal(9, 130))
    alone_O = multiply(row_1I)[0]
    for rows in ROWS:
        for place in {0, rows // 2, rows - 1}:
            x_TI = normal(rows, rows, 512)
            x_TI[rows // 3] *= 1e6
            x_TI[rows // 4] = torch.nan
            x_TI[place] = row_1I[0]
            assert torch.equal(multiply(x_TI)[place], alone_O)


@every_type
def test_the_number_of_threads_changes_no_bit(
    kernels: NativeKernels, normal: Callable[..., Tensor], threads: Callable[[int], object], kind: BlockType
) -> None:
    rows_OB, inputs = stored(kind, 10, 530, 512), [normal(rows, rows, 512) for rows in ROWS]
    answers = []
    for count in (1, 2, 3):
        with threads(count):
            multiply = product(kernels, kind, rows_OB)
            answers.append([multiply(x_TI) for x_TI in inputs])
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@every_type
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_number_makes_its_row_and_no_other_not_finite(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType, broken: float
) -> None:
    multiply = product(kernels, kind, stored(kind, 11, 30, 256))
    for column in (0, 37, 255):
        x_TI = normal(12, 4, 256)
        x_TI[2, column] = broken
        finite_TO = multiply(x_TI).isfinite()
        assert not finite_TO[2].any()
        assert finite_TO[[0, 1, 3]].all()


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind is not MXFP4], ids=lambda kind: kind.name)
def test_a_broken_scale_makes_its_output_not_finite(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType
) -> None:
    rows_OB = stored(kind, 13, 30, 256)
    place = scale_place(kind)
    for output, broken in ((3, np.nan), (17, np.inf)):
        rows_OB[output, place : place + 2] = torch.from_numpy(np.array([broken], np.float16).view(np.uint8))
    finite_TO = product(kernels, kind, rows_OB)(normal(14, 4, 256)).isfinite()
    assert [o for o in range(30) if not finite_TO[:, o].any()] == [3, 17]
    assert finite_TO[:, [o for o in range(30) if o not in (3, 17)]].all()


@every_type
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_rows_of_any_size_stay_finite_and_near(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType, size: float
) -> None:
    rows_OB, x_TI = stored(kind, 15, 30, 256), normal(16, 4, 256) * size
    exact_TO = x_TI.double() @ floats(kind, rows_OB).double().t()
    error = (product(kernels, kind, rows_OB)(x_TI).double() - exact_TO).norm()
    assert error < max(0.02 * exact_TO.norm().item(), 256 * torch.finfo(torch.float32).tiny)


@every_type
def test_stacked_parts_are_the_same_as_each_by_itself(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType
) -> None:
    """Parts begin and end within a panel, one of them is in another order, and the last outputs are padding."""
    parts = [stored(kind, seed, outputs, 256) for seed, outputs in ((17, 7), (18, 21), (19, 3))]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(20))
    whole = packed(
        kernels,
        blocks_of(kind, parts[0]),
        blocks_of(kind, parts[1], order).rows(2, 15),
        blocks_of(kind, parts[2]),
        num_outputs=29,
    )
    x_TI = normal(21, 5, 256)
    one_by_one = [parts[0], parts[1][order[2:17]], parts[2]]
    expected_TO = torch.cat([product(kernels, kind, part)(x_TI) for part in one_by_one], dim=1)
    assert torch.equal(whole.product(None)(x_TI)[:, :25], expected_TO)
    assert whole.product(None)(x_TI)[:, 25:].count_nonzero() == 0
    assert whole.lookup(torch.tensor([26, 28])).count_nonzero() == 0


@every_type
def test_the_file_is_read_and_forgotten_window_by_window(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, kind: BlockType
) -> None:
    """Windows end within a panel, and the last one is shorter."""
    rows_OB = stored(kind, 24, 40, 512)
    order, forgotten = torch.randperm(40, generator=torch.Generator().manual_seed(25)), []
    monkeypatch.setattr(products_of_blocks, "_WINDOW_BYTES", 7 * rows_OB.shape[1] + 1)
    mapped = MappedBlocks(kind, rows_OB, order, lambda: forgotten.append(1))
    whole = packed(kernels, mapped, num_outputs=40)
    assert len(forgotten) == 6
    assert [len(rows) for rows in mapped.windows()] == [7, 7, 7, 7, 7, 5]
    assert torch.equal(whole.packed, packed(kernels, blocks_of(kind, rows_OB[order]), num_outputs=40).packed)


@every_type
def test_columns_of_ranks_add_up(kernels: NativeKernels, normal: Callable[..., Tensor], kind: BlockType) -> None:
    whole = blocks_of(kind, stored(kind, 22, 40, 1024))
    x_TI = normal(23, 3, 1024)
    halves = [whole.columns(start, 512) for start in (0, 512)]
    for start, half in zip((0, 512), halves, strict=True):
        assert half is not None
        assert half.shape == (40, 512)
        floats_OI = floats(kind, whole.rows_OB)[:, start : start + 512]
        assert torch.equal(packed(kernels, half).lookup(torch.arange(40)), floats_OI)
    sums_TO = sum(packed(kernels, half).product(None)(x_TI[:, n * 512 :][:, :512]) for n, half in enumerate(halves) if half)
    assert torch.allclose(sums_TO, packed(kernels, whole).product(None)(x_TI), rtol=1e-4, atol=1e-3)


def test_columns_within_a_block_are_no_blocks() -> None:
    for kind in TYPES:
        whole = blocks_of(kind, stored(kind, 24, 4, 1024))
        assert whole.columns(0, kind.numbers // 2) is None
        assert whole.columns(kind.numbers // 2, kind.numbers) is None
        assert whole.columns(kind.numbers, kind.numbers) is not None


@every_type
def test_a_packed_weight_takes_the_bytes_of_the_file(kernels: NativeKernels, kind: BlockType) -> None:
    """The scales of MXFP4 have 8 bits in the file and 16 in memory."""
    wider = 256 * 1024 // 32 if kind is MXFP4 else 0
    assert packed_bytes(kernels.blocks, (256, 1024), kind) == 256 * kind.row_bytes(1024) + wider


def test_no_rows_and_no_outputs_give_none(kernels: NativeKernels) -> None:
    for kind in TYPES:
        assert product(kernels, kind, stored(kind, 25, 30, 256))(torch.empty(0, 256)).shape == (0, 30)
        assert product(kernels, kind, stored(kind, 26, 0, 256))(torch.ones(3, 256)).shape == (3, 0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("-mno-avx512f", marks=pytest.mark.long),
        *(
            pytest.param(each, marks=pytest.mark.lab)
            for each in ("-mno-avx2", "-mno-avx512vnni", "-mno-avx512f -mno-avxvnni", "-mno-avx")
        ),
    ],
)
def test_narrower_registers_compute_the_same(
    kernels: NativeKernels, compiled_with: Callable[[str], NativeKernels], normal: Callable[..., Tensor], options: str
) -> None:
    """To the bit where additions are not rounded twice. The largest levels and every number of rows."""
    narrow = compiled_with(options)
    for kind in TYPES:
        rows_OB, bias_O = stored(kind, 27, 33, 768), normal(28, 33)
        for rows in ROWS:
            x_TI = normal(rows, rows, 768)
            ours, theirs = (product(native, kind, rows_OB, bias_O)(x_TI) for native in (narrow, kernels))
            if "-mno-avx512" in options:
                assert torch.equal(ours, theirs), kind.name
            else:
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-4), kind.name
        for sign in (1, -1):
            largest_OB, loud_TI = largest_levels(kind, 20, 256), torch.full((9, 256), 127.0 * sign)
            expected_O = sign * 127.0 * floats(kind, largest_OB).sum(1)
            assert torch.equal(product(narrow, kind, largest_OB)(loud_TI), expected_O.expand(9, 20)), kind.name
