"""Attention of several new tokens against float64: windows, caps, groups, scattered blocks, steps cut anywhere."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.attention import PagedKeys
from ryzanstein.worker.kernels.native import NativeKernels

NEW = (2, 5, 64, 63, 130, 1, 17)
CONTEXT = (0, 3, 0, 200, 70, 64, 15)


@dataclass(frozen=True)
class Problem:
    """Queries [T, K, G, D] as parts of longer rows, pages whose unused slots are NaN."""

    q_TKGD: Tensor
    pages_NC: Tensor
    keys: PagedKeys
    scale: float
    cap: float | None

    def solve(self, kernels: NativeKernels) -> Tensor:
        out_TKGD = torch.full(self.q_TKGD.shape, 99.0)
        kernels.attention.attend(self.q_TKGD, self.pages_NC, self.keys, (self.scale, self.cap), out_TKGD)
        return out_TKGD

    def rows(self, s: int) -> slice:
        first = int(self.keys.rows_S[s])
        return slice(first, first + int(self.keys.num_new_S[s]))

    def part(self, s: int, skip: int, count: int) -> "Problem":
        """Only sequence s, and of its new tokens so many."""
        keys = self.keys
        length = keys.length_S[s : s + 1] - keys.num_new_S[s] + skip + count
        rows, tables = keys.rows_S[s : s + 1] + skip, keys.tables_SB[s : s + 1]
        return replace(
            self, keys=replace(keys, rows_S=rows, num_new_S=torch.tensor([count]), tables_SB=tables, length_S=length)
        )

    def exact(self, s: int, bias_KGL: Tensor | None = None) -> Tensor:
        """[n, K, G, D] in float64."""
        _, num_kv_heads, _, head_dim = self.q_TKGD.shape
        length, num_new, size = int(self.keys.length_S[s]), int(self.keys.num_new_S[s]), self.keys.block_size
        positions_L = torch.arange(length)
        seen_LC = self.pages_NC[self.keys.tables_SB[s][positions_L // size] * size + positions_L % size].double()
        width = num_kv_heads * head_dim
        k_LKD, v_LKD = (part.reshape(length, num_kv_heads, head_dim) for part in (seen_LC[:, :width], seen_LC[:, -width:]))
        scores = torch.einsum("nkgd,lkd->nkgl", self.q_TKGD[self.rows(s)].double(), k_LKD) * self.scale
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if bias_KGL is not None:
            scores = scores + bias_KGL
        own_n1 = torch.arange(length - num_new, length).unsqueeze(1)
        hidden_nL = (positions_L > own_n1) | (positions_L <= own_n1 - (self.keys.window or length + 1))
        scores = scores.masked_fill(hidden_nL[:, None, None], -torch.inf)
        return torch.einsum("nkgl,lkd->nkgd", scores.softmax(-1), v_LKD)


@pytest.fixture(scope="session")
def problem(normal: Callable[..., Tensor]) -> Callable[..., Problem]:
    """`problem(heads=(K, G, D), ...)`"""

    def make(
        heads: tuple[int, int, int],
        num_new: Sequence[int] = NEW,
        context: Sequence[int] = CONTEXT,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cap: float | None = None,
        window: int | None = None,
        latent: bool = False,
    ) -> Problem:
        num_kv_heads, group, head_dim = heads
        num_new_S, length_S = torch.tensor(num_new), torch.tensor(num_new) + torch.tensor(context)
        num_blocks = -(-int(length_S.max()) // block_size)
        generator = torch.Generator().manual_seed(5)
        tables_SB = torch.randperm(len(num_new) * num_blocks, generator=generator).view(len(num_new), num_blocks)
        keys = PagedKeys(num_new_S.cumsum(0) - num_new_S, num_new_S, tables_SB, length_S, block_size, window)
        columns = num_kv_heads * head_dim * (1 if latent else 2)
        pages_NC = torch.full((tables_SB.numel() * block_size, columns), torch.nan)
        for s, length in enumerate(length_S.tolist()):
            positions = torch.arange(length)
            pages_NC[tables_SB[s][positions // block_size] * block_size + positions % block_size] = normal(s, length, columns)
        width = num_kv_heads * group * head_dim
        q_TKGD = normal(9, int(num_new_S.sum()), width + 24)[:, 8 : 8 + width].view(-1, num_kv_heads, group, head_dim)
        return Problem(q_TKGD, pages_NC.to(dtype), keys, head_dim**-0.5, cap)

    return make


def check(kernels: NativeKernels, given: Problem) -> None:
    out_TKGD = given.solve(kernels)
    for s in range(len(given.keys.rows_S)):
        assert (out_TKGD[given.rows(s)].double() - given.exact(s)).abs().max() < 2e-6


@pytest.mark.parametrize(
    "heads", [(2, 1, 48), (1, 8, 64), (2, 3, 16), (3, 2, 80), (1, 71, 32), (2, 4, 128), (2, 1, 20)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_new_token_sees_itself_and_those_before(
    kernels: NativeKernels, problem: Callable[..., Problem], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(kernels, problem(heads, dtype=dtype))


@pytest.mark.parametrize("window", [1, 7, 64, 65, 100, 1000])
def test_a_window_hides_what_is_behind_it(kernels: NativeKernels, problem: Callable[..., Problem], window: int) -> None:
    check(kernels, problem((2, 2, 32), window=window))


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_blocks_of_any_size_with_a_cap(kernels: NativeKernels, problem: Callable[..., Problem], block_size: int) -> None:
    check(kernels, problem((2, 2, 32), block_size=block_size, cap=3.0))


def test_keys_that_are_values_as_well(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    check(kernels, problem((1, 6, 48), latent=True))


def test_a_token_gets_the_same_bits_however_its_prompt_is_cut(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    for given in (problem((2, 3, 48)), problem((2, 3, 48), window=40)):
        whole_TKGD = given.solve(kernels)
        for s, num_new in enumerate(NEW):
            for cut in {1, num_new // 2, num_new - 1} & set(range(1, num_new)):
                for skip, count in ((0, cut), (cut, num_new - cut)):
                    part = given.part(s, skip, count)
                    assert torch.equal(part.solve(kernels)[part.rows(0)], whole_TKGD[part.rows(0)])


def test_a_token_gets_the_same_bits_alone(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    """One new token of many sequences and a whole prompt are one order of operations."""
    for given in (problem((2, 3, 48)), problem((1, 8, 64), window=40), problem((3, 1, 20), cap=3.0), problem((1, 16, 576))):
        for half in (False, True):
            asked = replace(given, pages_NC=given.pages_NC.half()) if half else given
            whole_TKGD = asked.solve(kernels)
            for s, num_new in enumerate(NEW):
                for token in range(num_new):
                    part = asked.part(s, token, 1)
                    assert torch.equal(part.solve(kernels)[part.rows(0)], whole_TKGD[part.rows(0)])


@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx"])
def test_narrower_registers_keep_bits_as_well(
    problem: Callable[..., Problem], compiled_with: Callable[[str], NativeKernels], option: str
) -> None:
    narrow = compiled_with(option)
    for given in (problem((2, 3, 20)), problem((1, 8, 64), window=40)):
        whole_TKGD = given.solve(narrow)
        for s, num_new in enumerate(NEW):
            for skip, count in ((0, 1), (num_new - 1, 1), (0, num_new // 2 or 1)):
                part = given.part(s, skip, count)
                assert torch.equal(part.solve(narrow)[part.rows(0)], whole_TKGD[part.rows(0)])


LONG = (
    ((1, 4, 64), (1,), (2000,), {}),
    ((1, 3, 20), (1, 1, 20, 1), (3000, 10, 700, 255), {"cap": 3.0}),
    ((2, 2, 48), (1, 2), (1500, 1023), {"window": 600}),
    ((1, 16, 576), (1,), (1300,), {"latent": True}),
    ((2, 1, 32), (40,), (1216,), {"block_size": 24}),
)


@pytest.mark.parametrize("case", [((2, 3, 48), NEW, CONTEXT, {}), *LONG], ids=str)
def test_the_number_of_threads_changes_no_bit(
    kernels: NativeKernels,
    problem: Callable[..., Problem],
    threads: Callable[[int], AbstractContextManager[None]],
    case: tuple[tuple[int, int, int], Sequence[int], Sequence[int], dict[str, object]],
) -> None:
    """Several threads read one sequence, each some parts of it."""
    heads, num_new, context, options = case
    given = problem(heads, num_new, context, **options)
    with threads(1):
        alone = given.solve(kernels)
    check(kernels, given)
    for count in (2, 3, 7):
        with threads(count):
            assert torch.equal(given.solve(kernels), alone)


def test_a_long_sequence_has_the_same_bits_in_company_of_any_size(
    kernels: NativeKernels, problem: Callable[..., Problem], threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    """Alone several threads share it; beside seven like it each has one thread; of a prompt many rows are read at once."""
    given = problem((1, 2, 32), (150, *[1] * 7), (900, *[1000] * 7))
    with threads(2):
        whole_TKGD = given.solve(kernels)
        for s, num_new in enumerate(given.keys.num_new_S.tolist()):
            for token in {0, num_new // 2, num_new - 1}:
                part = given.part(s, token, 1)
                assert torch.equal(part.solve(kernels)[part.rows(0)], whole_TKGD[part.rows(0)])


def test_a_broken_key_of_one_part_spoils_the_answer(
    kernels: NativeKernels, problem: Callable[..., Problem], threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    for position in (0, 700, 1999, 2000):
        for broken in (torch.nan, torch.inf):
            given = problem((1, 4, 64), (1,), (2000,))
            size = given.keys.block_size
            given.pages_NC[given.keys.tables_SB[0][position // size] * size + position % size] = broken
            with threads(2):
                assert given.solve(kernels).isnan().all()


def test_a_broken_key_spoils_those_who_see_it_and_no_other_sequence(
    kernels: NativeKernels, problem: Callable[..., Problem]
) -> None:
    given = problem((2, 2, 32))
    size, broken = given.keys.block_size, 2
    given.pages_NC[given.keys.tables_SB[broken][0] * size + 1] = torch.nan
    finite_T = given.solve(kernels).isfinite().flatten(1).all(1)
    for s in range(len(NEW)):
        if s != broken:
            assert finite_T[given.rows(s)].all()
    assert not finite_T[given.rows(broken)][1:].any()


def test_a_value_that_is_infinite_spoils_no_token_before_it(kernels: NativeKernels, problem: Callable[..., Problem]) -> None:
    """A prompt's blocks may be another prompt's beginning: what a token leaves there must not depend on what follows it."""
    for heads in ((2, 2, 32), (2, 1, 32)):
        given = problem(heads)
        size, s, position = given.keys.block_size, 4, 100
        slot = given.keys.tables_SB[s][position // size] * size + position % size
        before_TKGD = given.solve(kernels)
        given.pages_NC[slot, -1] = torch.inf
        after_TKGD, first = given.solve(kernels), given.rows(s).start
        own = first + position - CONTEXT[s]
        assert torch.equal(after_TKGD[first:own], before_TKGD[first:own])
        assert not after_TKGD[own : given.rows(s).stop].isfinite().flatten(1).all(1).any()


def test_biases_of_positions_are_added_to_the_scores_of_their_head(
    kernels: NativeKernels, problem: Callable[..., Problem], normal: Callable[..., Tensor]
) -> None:
    given = problem((2, 3, 16))
    bias_HP = normal(4, 6, 300)
    biased = replace(given, keys=replace(given.keys, bias_HP=bias_HP)).solve(kernels)
    for s, length in enumerate(given.keys.length_S.tolist()):
        expected = given.exact(s, bias_HP[:, :length].double().view(2, 3, length))
        assert (biased[given.rows(s)].double() - expected).abs().max() < 2e-6
