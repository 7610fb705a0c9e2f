"""Attention over scattered blocks against float64: windows, caps, groups, head sizes, block sizes, lengths, both caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.attention import PagedKeys
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.int8 import quantize_rows

LENGTHS = (1, 15, 16, 17, 64, 65, 300)


@dataclass(frozen=True)
class Problem:
    """Queries [T, K, G, D] as parts of longer rows, pages, and which of their slots each sequence sees."""

    q_TKGD: Tensor
    pages_NC: Tensor
    keys: PagedKeys
    scale: float
    cap: float | None = None
    sinks_KG: Tensor | None = None

    def solve(self, kernels: NativeKernels, out_TKGD: Tensor | None = None) -> Tensor:
        if out_TKGD is None:
            out_TKGD = torch.full(self.q_TKGD.shape, 99.0)
        scoring = (self.scale, self.cap)
        kernels.attention.attend(self.q_TKGD, self.pages_NC, self.keys, scoring, out_TKGD, sinks_KG=self.sinks_KG)
        return out_TKGD

    def only(self, s: int) -> "Problem":
        keys = self.keys
        parts = (part[s : s + 1] for part in (keys.rows_S, keys.num_new_S, keys.tables_SB, keys.length_S))
        return replace(self, keys=PagedKeys(*parts, keys.block_size, keys.window))

    def slots(self, s: int) -> Tensor:
        length = int(self.keys.length_S[s])
        positions_L = torch.arange(max(0, length - (self.keys.window or length)), length)
        size = self.keys.block_size
        return self.keys.tables_SB[s][positions_L // size] * size + positions_L % size

    def exact(self, s: int) -> Tensor:
        """[K, G, D] in float64."""
        _, num_kv_heads, _, head_dim = self.q_TKGD.shape
        seen_LC = self.pages_NC[self.slots(s)].double()
        k_LKD, v_LKD = (
            part.reshape(-1, num_kv_heads, head_dim)
            for part in (seen_LC[:, : num_kv_heads * head_dim], seen_LC[:, -num_kv_heads * head_dim :])
        )
        scores_KGL = torch.einsum("kgd,lkd->kgl", self.q_TKGD[self.keys.rows_S[s]].double(), k_LKD) * self.scale
        if self.cap is not None:
            scores_KGL = self.cap * torch.tanh(scores_KGL / self.cap)
        if self.sinks_KG is not None:
            scores_KGL = torch.cat([scores_KGL, self.sinks_KG.double().unsqueeze(-1)], dim=-1)
        return torch.einsum("kgl,lkd->kgd", scores_KGL.softmax(-1)[..., : len(v_LKD)], v_LKD)


@pytest.fixture(scope="session")
def problem(normal: Callable[..., Tensor]) -> Callable[..., Problem]:
    """`problem(heads=(K, G, D), ...)`: rows in another order than sequences, blocks scattered, every other slot NaN."""

    def make(
        heads: tuple[int, int, int],
        lengths: Sequence[int] = LENGTHS,
        *,
        window: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cap: float | None = None,
        latent: bool = False,
    ) -> Problem:
        num_kv_heads, group, head_dim = heads
        num_tokens, num_blocks = len(lengths) + 2, -(-max(lengths) // block_size)
        generator = torch.Generator().manual_seed(3)
        rows_S = torch.randperm(num_tokens, generator=generator)[: len(lengths)]
        tables_SB = torch.randperm(len(lengths) * num_blocks, generator=generator).view(len(lengths), num_blocks)
        one_S = torch.ones(len(lengths), dtype=torch.int64)
        keys = PagedKeys(rows_S, one_S, tables_SB, torch.tensor(lengths), block_size, window)
        width = num_kv_heads * group * head_dim
        q_TKGD = normal(1, num_tokens, width + 10)[:, 3 : 3 + width].view(num_tokens, num_kv_heads, group, head_dim)
        columns = num_kv_heads * head_dim * (1 if latent else 2)
        pages_NC = torch.full((tables_SB.numel() * block_size, columns), torch.nan, dtype=dtype)
        made = Problem(q_TKGD, pages_NC, keys, head_dim**-0.5, cap)
        for s in range(len(lengths)):
            pages_NC[made.slots(s)] = normal(10 + s, len(made.slots(s)), columns).to(dtype)
        return made

    return make


def check(kernels: NativeKernels, problem: Problem) -> None:
    out_TKGD = problem.solve(kernels)
    for s, row in enumerate(problem.keys.rows_S.tolist()):
        torch.testing.assert_close(out_TKGD[row].double(), problem.exact(s), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [1, 12, 16, 20, 48, 64, 80, 100, 128, 576])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.long
def test_every_group_and_head_size(
    kernels: NativeKernels, problem: Callable[..., Problem], group: int, head_dim: int, dtype: torch.dtype
) -> None:
    check(kernels, problem((2, group, head_dim), dtype=dtype))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_every_number_of_heads_and_block_size(
    kernels: NativeKernels, problem: Callable[..., Problem], num_kv_heads: int, block_size: int
) -> None:
    check(kernels, problem((num_kv_heads, 2, 32), block_size=block_size))


@pytest.mark.parametrize("group", [5, 6, 7, 13, 32, 71])
def test_groups_that_are_no_multiple_of_what_registers_hold(
    kernels: NativeKernels, problem: Callable[..., Problem], group: int
) -> None:
    check(kernels, problem((1, group, 64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [1, 14, 64, 65, 129])
def test_a_window_begins_anywhere_and_nothing_before_it_counts(
    kernels: NativeKernels, problem: Callable[..., Problem], block_size: int, window: int, dtype: torch.dtype
) -> None:
    """What lies before it is NaN."""
    check(kernels, problem((2, 3, 48), window=window, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("group", [1, 4])
def test_scores_are_capped(kernels: NativeKernels, problem: Callable[..., Problem], group: int, cap: float) -> None:
    capped = problem((2, group, 64), cap=cap)
    check(kernels, capped)
    assert not torch.allclose(capped.solve(kernels), replace(capped, cap=None).solve(kernels), atol=1e-5)


def test_sinks_count_in_the_sum_alone(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    """Sinks below all scores, among them and far above them: there nothing is left of the values."""
    sinks_KG = torch.tensor([[-90.0, 0.3, 2.0], [1.0, 90.0, -1.0]])
    made = replace(problem((2, 3, 24), window=40), sinks_KG=sinks_KG)
    found = made.solve(kernels)
    for s in range(len(LENGTHS)):
        answer = found[made.keys.rows_S[s]]
        assert torch.allclose(answer.double(), made.exact(s), rtol=1e-5, atol=1e-6), s
        assert (answer[1, 1].abs() < 1e-30).all()
        assert torch.equal(answer[0, 0], replace(made, sinks_KG=None).solve(kernels)[made.keys.rows_S[s]][0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 4, 16])
def test_a_latent_is_key_and_value_at_once(
    kernels: NativeKernels, problem: Callable[..., Problem], group: int, dtype: torch.dtype
) -> None:
    check(kernels, problem((1, group, 576), dtype=dtype, latent=True))


def test_a_key_that_outweighs_all_others_in_any_chunk(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    """Scores of some hundreds: without the greatest subtracted, their exponentials are infinite."""
    loud = problem((1, 4, 64), (300, 300, 300))
    for s, position in enumerate((0, 150, 299)):
        loud.pages_NC[loud.slots(s)[position], :64] = 1000 * loud.q_TKGD[loud.keys.rows_S[s], 0, 0]
    check(kernels, loud)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("place", [(0, 5), (70, 5), (99, 5), (0, 69), (70, 69), (99, 69)], ids=str)
def test_what_is_no_number_comes_out_in_its_sequence_only(
    kernels: NativeKernels, problem: Callable[..., Problem], place: tuple[int, int], value: float, group: int
) -> None:
    """`place`: the position and the column, of its key or its value."""
    spoilt = problem((1, group, 64), (100, 100, 33))
    position, column = place
    spoilt.pages_NC[spoilt.slots(1)[position], column] = value
    spoilt.q_TKGD[..., 5] = spoilt.q_TKGD[..., 5].abs()  # infinity times a negative number would be a key not seen
    unspoilt_TKGD = spoilt.only(0).solve(kernels)
    out_TKGD, rows = spoilt.solve(kernels), spoilt.keys.rows_S.tolist()
    assert not out_TKGD[rows[1]].isfinite().all(dim=-1).any()
    assert torch.equal(out_TKGD[rows[0]], unspoilt_TKGD[rows[0]])
    assert out_TKGD[rows[2]].isfinite().all()


def test_a_sequence_whose_every_score_is_minus_infinity_has_no_answer(
    kernels: NativeKernels, problem: Callable[..., Problem]
) -> None:
    """As in torch; one key of many with such a score has no weight."""
    hidden = problem((1, 1, 16), (3, 1))
    hidden.q_TKGD.abs_()
    hidden.pages_NC[hidden.slots(0)[1], :16] = -torch.inf
    hidden.pages_NC[hidden.slots(1)[0], :16] = -torch.inf
    out_TKGD, rows = hidden.solve(kernels), hidden.keys.rows_S.tolist()
    torch.testing.assert_close(out_TKGD[rows[0]].double(), hidden.exact(0), rtol=1e-5, atol=2e-6)
    assert out_TKGD[rows[1]].isnan().all()


@pytest.mark.parametrize("heads", [(1, 1, 48), (4, 8, 64), (2, 3, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_with_two_threads(
    kernels: NativeKernels,
    problem: Callable[..., Problem],
    threads: Callable,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    batch = problem(heads, dtype=dtype)
    with threads(1):
        together_TKGD = batch.solve(kernels)
        alone_TKGD = torch.full_like(together_TKGD, 99.0)
        for s in range(len(LENGTHS)):
            batch.only(s).solve(kernels, alone_TKGD)
    with threads(2):
        assert torch.equal(together_TKGD, batch.solve(kernels))
    assert torch.equal(together_TKGD, alone_TKGD)


def test_rows_of_other_sequences_are_left_alone(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    """The output is a part of longer rows; some of its rows belong to prompts that something else computes."""
    batch = problem((2, 2, 16))
    wide_TW = torch.full((len(batch.q_TKGD), 2 * 2 * 16 + 8), 99.0)
    batch.solve(kernels, wide_TW[:, 4:-4].view(batch.q_TKGD.shape))
    others = sorted(set(range(len(wide_TW))) - set(batch.keys.rows_S.tolist()))
    assert len(others) == 2
    assert (wide_TW[others] == 99).all()
    assert (wide_TW[:, :4] == 99).all()
    assert (wide_TW[:, -4:] == 99).all()
    assert torch.equal(wide_TW[batch.keys.rows_S, 4:-4], batch.solve(kernels)[batch.keys.rows_S].flatten(1))


@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx", pytest.param("-mno-f16c -mno-avx512f", marks=pytest.mark.lab)])
@pytest.mark.long
def test_narrower_registers_compute_the_same(
    problem: Callable[..., Problem],
    normal: Callable[..., Tensor],
    compiled_with: Callable[[str], NativeKernels],
    option: str,
) -> None:
    """As on CPUs that have no others."""
    narrow = compiled_with(option)
    for dtype in (torch.float32, torch.float16):
        check(narrow, problem((2, 3, 48), window=100, dtype=dtype))
        check(narrow, problem((1, 8, 64), dtype=dtype, cap=3.0))
    x_TE = normal(1, 5, 250)
    assert all(map(torch.equal, narrow.rows.quantize_rows(x_TE, torch.int8), quantize_rows(x_TE, torch.int8)))
