"""Rotation and the write into the cache, in one call, against torch's operators."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import RotarySpec
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.layers.rotary import Rotary, rotate

NUM_SLOTS = 700


@dataclass(frozen=True)
class Rows:
    """Rows of queries, keys and values side by side, as a product leaves them."""

    qkv_T: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qk_THD(self) -> Tensor:
        num_heads = self.num_heads + self.num_kv_heads
        return self.qkv_T[:, : num_heads * self.head_dim].view(len(self.qkv_T), num_heads, self.head_dim)

    @property
    def kv_TC(self) -> Tensor:
        return self.qkv_T[:, self.num_heads * self.head_dim :]

    def copy(self) -> "Rows":
        return Rows(self.qkv_T.clone(), self.num_heads, self.num_kv_heads, self.head_dim)


def new_pages(rows: Rows, dtype: torch.dtype) -> Tensor:
    return torch.full((NUM_SLOTS, 2 * rows.num_kv_heads * rows.head_dim), -7.0, dtype=dtype)


def angles_of(num_tokens: int, num_rotated: int, *, interleaved: bool) -> Angles:
    positions_T = torch.arange(num_tokens) * 13 + 5
    spec = RotarySpec(10_000.0, num_rotated, interleaved=interleaved)
    return Rotary(spec, torch.device("cpu")).angles(positions_T, torch.float32)


def by_torch(rows: Rows, angles: Angles, pages_NC: Tensor, slots_T: Tensor) -> None:
    rotate(rows.qk_THD, angles)
    pages_NC.index_copy_(0, slots_T, rows.kv_TC.to(pages_NC.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("head_dim", "num_rotated"), [(64, 64), (80, 32), (10, 10), (12, 6), (8, 2), (576, 64)])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (1, 1)], ids=str)
@pytest.mark.long
def test_rows_and_slots_are_those_of_torch(  # noqa: PLR0917 - they are all combined
    kernels: NativeKernels,
    normal: Callable[..., Tensor],
    heads: tuple[int, int],
    num_tokens: int,
    head_dim: int,
    num_rotated: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads = heads
    rows = Rows(normal(1, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), num_heads, num_kv_heads, head_dim)
    angles = angles_of(num_tokens, num_rotated, interleaved=interleaved)
    slots_T = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2))[:num_tokens]
    expected, expected_NC, pages_NC = rows.copy(), new_pages(rows, dtype), new_pages(rows, dtype)
    by_torch(expected, angles, expected_NC, slots_T)
    kernels.rotation.rotate_and_store(rows.qk_THD, angles, rows.kv_TC, pages_NC, slots_T)
    torch.testing.assert_close(rows.qkv_T, expected.qkv_T, rtol=1e-6, atol=1e-6)
    assert torch.equal(pages_NC[slots_T], rows.kv_TC.to(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(pages_NC, expected_NC, rtol=tolerance, atol=1e-6)


def test_what_is_not_rotated_keeps_its_bits(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    rows = Rows(normal(1, 4, 5 * 16), 3, 1, 16)
    before = rows.copy()
    kernels.rotation.rotate_and_store(
        rows.qk_THD, angles_of(4, 4, interleaved=False), rows.kv_TC, new_pages(rows, torch.float32), torch.arange(4)
    )
    assert torch.equal(rows.qk_THD[..., 4:], before.qk_THD[..., 4:])
    assert not torch.equal(rows.qk_THD[..., :4], before.qk_THD[..., :4])
    assert torch.equal(rows.qkv_T[:, 4 * 16 :], before.qkv_T[:, 4 * 16 :])


def test_the_first_layer_of_many_is_written_where_it_lies(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    """Pages are a part of a larger tensor, as those of a layer are."""
    rows = Rows(normal(1, 2, 3 * 16), 1, 1, 16)
    pages_LNC = torch.zeros(3, 9, 32)
    kernels.rotation.rotate_and_store(
        rows.qk_THD, angles_of(2, 16, interleaved=True), rows.kv_TC, pages_LNC[1], torch.tensor([8, 3])
    )
    assert torch.equal(pages_LNC[1, [8, 3]], rows.kv_TC)
    assert pages_LNC.count_nonzero() == rows.kv_TC.count_nonzero()


def test_float16_slots_round_to_even_overflow_to_infinity_and_keep_nan(kernels: NativeKernels) -> None:
    values = [1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65520.0, -1e6, torch.nan, 2.0**-24, 2.0**-26, -0.0]
    rows = Rows(torch.zeros(1, 3 * 16), 1, 1, 16)
    rows.qkv_T[0, 32 : 32 + len(values)] = torch.tensor(values)
    pages_NC = new_pages(rows, torch.float16)
    kernels.rotation.rotate_and_store(rows.qk_THD, angles_of(1, 16, interleaved=False), rows.kv_TC, pages_NC, torch.tensor([5]))
    stored, expected = pages_NC[5, 16 : 16 + len(values)], torch.tensor(values).half()
    assert torch.equal(stored.isnan(), expected.isnan())
    assert torch.equal(stored.nan_to_num(0.0).view(torch.int16), expected.nan_to_num(0.0).view(torch.int16))


def test_tokens_have_the_same_bits_alone_together_and_with_two_threads(
    kernels: NativeKernels, normal: Callable[..., Tensor], threads: Callable
) -> None:
    start = Rows(normal(1, 600, 3 * 80), 1, 1, 80)
    angles = angles_of(600, 32, interleaved=False)

    def together(count: int) -> Tensor:
        rows = start.copy()
        with threads(count):
            kernels.rotation.rotate_and_store(
                rows.qk_THD, angles, rows.kv_TC, new_pages(rows, torch.float32), torch.arange(600)
            )
        return rows.qkv_T

    def alone(t: int) -> Tensor:
        row = Rows(start.qkv_T[t : t + 1].clone(), 1, 1, 80)
        own = Angles(angles.cos_T1R[t : t + 1], angles.sin_T1R[t : t + 1], interleaved=False)
        kernels.rotation.rotate_and_store(row.qk_THD, own, row.kv_TC, new_pages(row, torch.float32), torch.tensor([t]))
        return row.qkv_T

    assert torch.equal(together(1), together(2))
    assert torch.equal(together(1), torch.cat([alone(t) for t in range(600)]))
