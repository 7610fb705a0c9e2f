"""Sealed pages against torch's own 8-bit types, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.cache.cold_pages import open_pages, seal_pages
from ryzanstein.worker.kernels.functions.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, ColdKind, ColdLayout
from ryzanstein.worker.kernels.native import NativeKernels

KINDS = [FP8, INT8, FP8_VALUES, CHANNELS]


def sealed(
    seal: Callable[..., None],
    pages_NC: Tensor,
    layout: ColdLayout,
    hot: tuple[int, ...] = (2, 0),
    cold: tuple[int, ...] = (1, 3),
) -> Tensor:
    cold_BX = torch.full((5, layout.block_bytes), 0xA5, dtype=torch.uint8)
    seal(pages_NC, torch.tensor(hot), cold_BX, torch.tensor(cold), layout)
    return cold_BX


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("heads", [(1, 16), (2, 64), (3, 20), (1, 33), (2, 256)], ids=str)
def test_a_block_has_the_bits_of_torch(
    kernels: NativeKernels, normal: Callable[..., Tensor], heads: tuple[int, int], kind: ColdKind, dtype: torch.dtype
) -> None:
    """Numbers of very different sizes: normal and subnormal ones of FP8, exact halves, zeros. Other blocks stay as they are."""
    layout = ColdLayout(kind, *heads)
    columns = 2 * heads[0] * heads[1]
    pages_NC = normal(1, 48, columns) * torch.exp2(normal(2, 48, columns) * 4).clamp(2**-14, 100)
    pages_NC[3] = 0
    pages_NC[5] = pages_NC[5].round()
    pages_NC[40] = 300  # whole eighths of the scale when it is the greatest
    pages_NC = pages_NC.to(dtype)
    assert torch.equal(sealed(kernels.attention.seal, pages_NC, layout), sealed(seal_pages, pages_NC, layout))


def test_every_number_of_fp8_and_what_lies_between_is_rounded_as_torch_rounds(kernels: NativeKernels) -> None:
    """The scale is 1. Halves are rounded to even."""
    layout = ColdLayout(FP8, 1, 64)
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(1e9)), grid])
    numbers = torch.cat([near, -near, torch.tensor([448.0])])
    keys_JD = torch.zeros(16 * 64)
    keys_JD[: len(numbers)] = numbers
    pages_NC = torch.cat([keys_JD.view(16, 64), keys_JD.view(16, 64)], dim=1)
    block = sealed(kernels.attention.seal, pages_NC, layout, (0,), (0,))
    k_LKD, v_LKD = open_pages(block, torch.tensor([0]), layout)
    expected = keys_JD.to(torch.float8_e4m3fn).float().view(16, 1, 64)
    assert torch.equal(k_LKD, expected)
    assert torch.equal(v_LKD, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_no_number_stays_so_in_its_head_only(
    kernels: NativeKernels, normal: Callable[..., Tensor], kind: ColdKind, value: float
) -> None:
    layout = ColdLayout(kind, 2, 32)
    pages_NC = normal(1, 16, 128)
    pages_NC[7, 3] = value  # the first head's key
    pages_NC[9, 127] = value  # the second head's value
    for seal in (kernels.attention.seal, seal_pages):
        k_LKD, v_LKD = open_pages(sealed(seal, pages_NC, layout, (0,), (0,)), torch.tensor([0]), layout)
        assert not k_LKD[7, 0, 3].isfinite()
        assert v_LKD[:, 1].isnan().all()
        assert k_LKD[:, 1].isfinite().all()
        assert v_LKD[:, 0].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3.4e38], ids=str)
def test_numbers_at_the_ends_of_float32_stay_finite(kernels: NativeKernels, size: float) -> None:
    layout = ColdLayout(FP8, 1, 16)
    pages_NC = torch.full((16, 32), size)
    k_LKD, v_LKD = open_pages(sealed(kernels.attention.seal, pages_NC, layout, (0,), (0,)), torch.tensor([0]), layout)
    assert (k_LKD - size).abs().max() <= max(size * 2**-4, 2**-126 * 2**-10)
    assert v_LKD.isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx", pytest.param("-mno-f16c -mno-avx512f", marks=pytest.mark.lab)])
def test_narrower_registers_seal_the_same(
    normal: Callable[..., Tensor], compiled_with: Callable[[str], NativeKernels], option: str, kind: ColdKind
) -> None:
    layout, pages_NC = ColdLayout(kind, 2, 40), normal(3, 48, 160)
    assert torch.equal(sealed(compiled_with(option).attention.seal, pages_NC, layout), sealed(seal_pages, pages_NC, layout))


def test_ranks_seal_their_heads_of_the_whole_block(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    whole, pages_NC = ColdLayout(FP8, 4, 32), normal(4, 48, 256)
    expected = sealed(kernels.attention.seal, pages_NC, whole)
    for num_ranks in (1, 2, 4):
        mine = ColdLayout(FP8, 4 // num_ranks, 32)
        width = mine.num_kv_heads * 32
        parts = [
            torch.cat([pages_NC[:, r * width : (r + 1) * width], pages_NC[:, 128 + r * width : 128 + (r + 1) * width]], dim=1)
            for r in range(num_ranks)
        ]
        assert torch.equal(torch.cat([sealed(kernels.attention.seal, part, mine) for part in parts], dim=1), expected)
