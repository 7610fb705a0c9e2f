"""Attention over cold and hot pages: against float64, against the same keys kept whole, and bit for bit in any company."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ryzanstein.worker.cache.cold_pages import attend_zones, open_pages
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.kernels.functions.attention import ColdKeys, PagedKeys
from ryzanstein.worker.kernels.functions.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, ColdKind, ColdLayout, sees_cold
from ryzanstein.worker.kernels.native import NativeKernels

KINDS = [FP8, INT8, FP8_VALUES, CHANNELS]
NEW = (2, 5, 64, 63, 130, 1, 17, 1)
CONTEXT = (0, 3, 0, 200, 70, 64, 15, 300)


@dataclass(frozen=True)
class Problem:
    """Queries [T, K, G, D]; hot and cold pages of which those that no token may read are NaN."""

    q_TKGD: Tensor
    pages_NC: Tensor
    cold_BX: Tensor
    keys: PagedKeys
    scale: float
    cap: float | None = None

    def solve(self, kernels: NativeKernels, lse_TKG: Tensor | None = None) -> Tensor:
        out_TKGD = torch.full(self.q_TKGD.shape, 99.0)
        scoring = self.scale, self.cap
        kernels.attention.attend(
            self.q_TKGD, self.pages_NC, self.keys, scoring, out_TKGD, cold_BX=self.cold_BX, lse_TKG=lse_TKG
        )
        return out_TKGD

    @property
    def cold(self) -> ColdKeys:
        assert self.keys.cold is not None
        return self.keys.cold

    def rows(self, s: int) -> slice:
        first = int(self.keys.rows_S[s])
        return slice(first, first + int(self.keys.num_new_S[s]))

    def part(self, s: int, skip: int, count: int) -> "Problem":
        """Only sequence s, and of its new tokens so many."""
        keys, cold = self.keys, self.cold
        length = keys.length_S[s : s + 1] - keys.num_new_S[s] + skip + count
        assert keys.first_S is not None
        assert cold.first_S is not None
        own = replace(cold, tables_SB=cold.tables_SB[s : s + 1].contiguous(), first_S=cold.first_S[s : s + 1])
        return replace(
            self,
            keys=replace(
                keys,
                rows_S=keys.rows_S[s : s + 1] + skip,
                num_new_S=torch.tensor([count]),
                tables_SB=keys.tables_SB[s : s + 1].contiguous(),
                length_S=length,
                first_S=keys.first_S[s : s + 1],
                cold=own,
            ),
        )

    def exact(self, s: int, token: int) -> Tensor:
        """[K, G, D] in float64, key by key as the rule says."""
        position = int(self.keys.length_S[s] - self.keys.num_new_S[s]) + token
        heads, head_dim = self.q_TKGD.shape[1], self.q_TKGD.shape[3]
        pages, window = sees_cold(position, self.cold.hot_tokens), self.keys.window or position + 1
        assert self.keys.first_S is not None
        assert self.cold.first_S is not None
        keys, values = [], []
        for p in range(max(0, position + 1 - window), position + 1):
            page, slot = divmod(p, 16)
            if page < pages:
                block = self.cold.tables_SB[s][page - self.cold.first_S[s]].view(1)
                k_LKD, v_LKD = open_pages(self.cold_BX, block, self.cold.layout)
                keys.append(k_LKD[slot].double())
                values.append(v_LKD[slot].double())
            else:
                row = self.pages_NC[self.keys.tables_SB[s][page - self.keys.first_S[s]] * 16 + slot].double()
                keys.append(row[: heads * head_dim].view(heads, head_dim))
                values.append(row[-heads * head_dim :].view(heads, head_dim))
        k_LKD, v_LKD = torch.stack(keys), torch.stack(values)
        scores_KGL = torch.einsum("kgd,lkd->kgl", self.q_TKGD[int(self.keys.rows_S[s]) + token].double(), k_LKD) * self.scale
        if self.cap is not None:
            scores_KGL = self.cap * torch.tanh(scores_KGL / self.cap)
        if self.keys.bias_HP is not None:
            seen_HP = self.keys.bias_HP[:, max(0, position + 1 - window) : position + 1].double()
            scores_KGL = scores_KGL + seen_HP.view(*scores_KGL.shape)
        return torch.einsum("kgl,lkd->kgd", scores_KGL.softmax(-1), v_LKD)


def make(
    kernels: NativeKernels,
    heads: tuple[int, int, int],
    num_new: Sequence[int] = NEW,
    context: Sequence[int] = CONTEXT,
    *,
    hot_tokens: int = 20,
    kind: ColdKind = FP8,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
    window: int | None = None,
    numbers: Callable[[Tensor], Tensor] = lambda x: x,
    seed: int = 0,
) -> Problem:
    """Each sequence's keys, sealed where a token of the step may see them cold, and kept where one may see them hot."""
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads, group, head_dim = heads
    num_new_S, length_S = torch.tensor(num_new), torch.tensor(num_new) + torch.tensor(context)
    most = -(-int(length_S.max()) // 16) + 1
    layout, columns = ColdLayout(kind, num_kv_heads, head_dim), 2 * num_kv_heads * head_dim
    count = len(num_new) * most
    hot_tables_SB, cold_tables_SB = (torch.randperm(count, generator=generator).view(-1, most) for _ in range(2))
    pages_NC = torch.full((count * 16, columns), torch.nan, dtype=dtype)
    cold_BX = torch.full((count, layout.block_bytes), 0xFF, dtype=torch.uint8)
    hot_first, cold_first = [], []
    for s, (new, before) in enumerate(zip(num_new, context, strict=True)):
        kept = numbers(torch.randn(-(-(new + before) // 16) * 16, columns, generator=generator))
        oldest, newest = sees_cold(before, hot_tokens), sees_cold(before + new - 1, hot_tokens)
        begin = 0 if window is None else max(0, before + 1 - window) // 16
        hot_first.append(oldest)
        cold_first.append(min(begin, newest))
        for page in range(begin, newest):
            slots = torch.arange(16)
            whole_NC = kept[page * 16 : page * 16 + 16].to(dtype)
            kernels.attention.seal(
                whole_NC[slots].contiguous(),
                torch.tensor([0]),
                cold_BX,
                cold_tables_SB[s, page - cold_first[-1]].view(1),
                layout,
            )
        for p in range(max(oldest, begin) * 16, new + before):
            pages_NC[hot_tables_SB[s, p // 16 - oldest] * 16 + p % 16] = kept[p].to(dtype)
    cold = ColdKeys(cold_tables_SB.contiguous(), layout, hot_tokens, torch.tensor(cold_first))
    rows_S = num_new_S.cumsum(0) - num_new_S
    keys = PagedKeys(
        rows_S, num_new_S, hot_tables_SB.contiguous(), length_S, 16, window, first_S=torch.tensor(hot_first), cold=cold
    )
    width = num_kv_heads * group * head_dim
    q_TKGD = torch.randn(int(num_new_S.sum()), width + 24, generator=generator)[:, 8 : 8 + width]
    return Problem(q_TKGD.view(-1, num_kv_heads, group, head_dim), pages_NC, cold_BX, keys, head_dim**-0.5, cap)


def check(kernels: NativeKernels, problem: Problem, every: int = 29) -> None:
    out_TKGD = problem.solve(kernels)
    for s, num_new in enumerate(problem.keys.num_new_S.tolist()):
        for token in {*range(0, num_new, every), num_new - 1}:
            found = out_TKGD[problem.rows(s)][token].double()
            torch.testing.assert_close(found, problem.exact(s, token), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "heads", [(2, 1, 48), (1, 8, 64), (2, 3, 16), (3, 2, 80), (1, 32, 32), (2, 4, 128), (2, 1, 20), (1, 4, 256)], ids=str
)
@pytest.mark.long
def test_every_new_token_sees_old_pages_cold_and_young_ones_hot(
    kernels: NativeKernels, heads: tuple[int, int, int], kind: ColdKind
) -> None:
    check(kernels, make(kernels, heads, kind=kind, dtype=torch.float16 if heads[0] == 2 else torch.float32), every=23)


@pytest.mark.parametrize("hot_tokens", [0, 16, 20, 33, 64, 1000])
@pytest.mark.parametrize("window", [None, 1, 40, 100])
def test_hot_zones_and_windows_of_any_size(kernels: NativeKernels, hot_tokens: int, window: int | None) -> None:
    check(kernels, make(kernels, (2, 2, 32), hot_tokens=hot_tokens, window=window), every=31)


def test_caps_and_biases_of_positions_hold_in_cold_pages(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    problem = make(kernels, (2, 3, 16), cap=3.0)
    check(kernels, problem)
    check(kernels, replace(problem, keys=replace(problem.keys, bias_HP=normal(4, 6, 320))))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_gets_the_same_bits_alone_and_however_its_prompt_is_cut(kernels: NativeKernels, kind: ColdKind) -> None:
    for problem in (
        make(kernels, (2, 3, 48), kind=kind),
        make(kernels, (1, 8, 64), window=70, kind=kind, dtype=torch.float16),
        make(kernels, (3, 1, 20), cap=3.0, kind=kind, hot_tokens=0),
        make(kernels, (1, 32, 64), kind=kind),
    ):
        whole_TKGD = problem.solve(kernels)
        for s, num_new in enumerate(NEW):
            alone = [(token, 1) for token in range(0, num_new, 5)]
            cuts = [*alone, (0, num_new // 2), (num_new // 2, num_new - num_new // 2)]
            for skip, count in cuts:
                if count:
                    part = problem.part(s, skip, count)
                    assert torch.equal(part.solve(kernels)[part.rows(0)], whole_TKGD[part.rows(0)])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_number_of_threads_changes_no_bit(
    kernels: NativeKernels, threads: Callable[[int], AbstractContextManager[None]], kind: ColdKind
) -> None:
    """Several threads read one sequence, each some parts of it."""
    for problem in (
        make(kernels, (2, 3, 48), kind=kind),
        make(kernels, (1, 4, 64), (1,), (1700,), kind=kind),
        make(kernels, (1, 2, 40), (20, 1, 1), (900, 1030, 3), kind=kind, window=600, hot_tokens=300),
    ):
        alone_TKG, together_TKG = (torch.zeros(problem.q_TKGD.shape[:3]) for _ in range(2))
        with threads(1):
            alone_TKGD = problem.solve(kernels, alone_TKG)
        check(kernels, problem)
        for count in (2, 3):
            with threads(count):
                assert torch.equal(problem.solve(kernels, together_TKG), alone_TKGD)
                assert torch.equal(together_TKG, alone_TKG)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_problems_agree_with_float64_and_with_torch(kernels: NativeKernels, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, 70), min_size=count, max_size=count)
    heads = data.draw(st.sampled_from([(1, 1, 32), (2, 5, 24), (1, 4, 64), (4, 2, 40)]))
    problem = make(
        kernels,
        heads,
        data.draw(lengths),
        [n - 1 for n in data.draw(lengths)],
        hot_tokens=data.draw(st.integers(0, 50)),
        kind=data.draw(st.sampled_from(KINDS)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),
        window=data.draw(st.none() | st.integers(1, 90)),
        cap=data.draw(st.none() | st.just(5.0)),
        seed=data.draw(st.integers(0, 1000)),
    )
    check(kernels, problem)
    lse_TKG, expected_TKG = (torch.zeros(problem.q_TKGD.shape[:3]) for _ in range(2))
    out_TKGD, expected_TKGD = problem.solve(kernels, lse_TKG), torch.zeros(problem.q_TKGD.shape)
    scoring = problem.scale, problem.cap
    pages = LayerPages(problem.pages_NC, problem.cold_BX)
    attend_zones(problem.q_TKGD, pages, problem.keys, scoring, expected_TKGD, lse_TKG=expected_TKG)
    torch.testing.assert_close(out_TKGD, expected_TKGD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse_TKG, expected_TKG, rtol=1e-5, atol=1e-5)


def exactly_fp8(x: Tensor) -> Tensor:
    """Numbers of FP8 whose greatest in every page and head is 448 / 64: the scale is a power of two."""
    found = (x * 2).to(torch.float8_e4m3fn).float().clamp(-7, 7)
    found[::16] = 7
    return found


@pytest.mark.parametrize("heads", [(2, 3, 64), (1, 1, 32), (1, 4, 256)], ids=str)
def test_numbers_that_fp8_has_exactly_lose_nothing(kernels: NativeKernels, heads: tuple[int, int, int]) -> None:
    """Cold scores are summed in another order: equal up to float32's rounding. With 64 hot tokens a chunk is of one kind in
    every 64th position, and the order of the values' sums is the same."""
    problem = make(kernels, heads, numbers=exactly_fp8, hot_tokens=64)
    hot = make(kernels, heads, numbers=exactly_fp8, hot_tokens=10_000)
    torch.testing.assert_close(problem.solve(kernels), hot.solve(kernels), rtol=1e-5, atol=1e-5)
    k_LKD, _ = open_pages(problem.cold_BX, problem.cold.tables_SB[3][:1], problem.cold.layout)
    assert torch.equal(k_LKD, exactly_fp8(k_LKD.flatten(1) / 2).view(k_LKD.shape))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ranks_attend_to_their_heads_as_the_whole_does(kernels: NativeKernels, num_ranks: int, kind: ColdKind) -> None:
    whole = make(kernels, (4, 2, 32), kind=kind)
    expected_TKGD = whole.solve(kernels)
    num_heads, part_bytes = 4 // num_ranks, whole.cold.layout.part_bytes
    for rank in range(num_ranks):
        heads, width = slice(rank * num_heads, (rank + 1) * num_heads), 4 * 32
        columns = torch.arange(rank * num_heads * 32, (rank + 1) * num_heads * 32)
        own = replace(
            whole,
            q_TKGD=whole.q_TKGD[:, heads].contiguous(),
            pages_NC=whole.pages_NC[:, torch.cat([columns, width + columns])].contiguous(),
            cold_BX=whole.cold_BX.view(len(whole.cold_BX), 4, part_bytes)[:, heads].flatten(1).contiguous(),
            keys=replace(whole.keys, cold=replace(whole.cold, layout=ColdLayout(kind, num_heads, 32))),
        )
        assert torch.equal(own.solve(kernels), expected_TKGD[:, heads])


def test_zones_are_merged_by_their_log_sum_exp(kernels: NativeKernels) -> None:
    """Zones anywhere: within pages, empty, of cold and of hot keys."""
    problem = make(kernels, (2, 3, 32))
    whole_TKG = torch.zeros(problem.q_TKGD.shape[:3])
    whole_TKGD = problem.solve(kernels, whole_TKG)
    borders = [0, 5, 64, 100, 133, 400]
    parts = []
    for begin, end in pairwise(borders):
        each_S = torch.ones(len(NEW), dtype=torch.int64)
        lse_TKG = torch.zeros(problem.q_TKGD.shape[:3])
        zone = replace(problem, keys=replace(problem.keys, begin_S=each_S * begin, end_S=each_S * end))
        parts.append((zone.solve(kernels, lse_TKG), lse_TKG))
    total_TKG = torch.stack([lse for _, lse in parts]).double().logsumexp(0)
    merged_TKGD = sum(out.double() * (lse - total_TKG).exp().unsqueeze(-1) for out, lse in parts)
    torch.testing.assert_close(total_TKG, whole_TKG.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_TKGD, whole_TKGD.double(), rtol=1e-5, atol=2e-6)
    assert (parts[-1][0][problem.rows(0)] == 0).all()
    assert (parts[-1][1][problem.rows(0)] == -torch.inf).all()


def test_a_broken_page_spoils_those_who_see_it_cold_and_no_other(kernels: NativeKernels) -> None:
    problem = make(kernels, (2, 2, 32))
    broken = 4
    block = int(problem.cold.tables_SB[broken][2])
    before_TKGD = problem.solve(kernels)
    spoilt_BX = problem.cold_BX.clone()
    spoilt_BX[block, :4] = torch.tensor([torch.nan]).view(torch.uint8)  # the first head's scale of keys
    after_TKGD = replace(problem, cold_BX=spoilt_BX).solve(kernels)
    first = 3 * 16 + 20 - 1 - CONTEXT[broken]
    seen = slice(max(0, first), NEW[broken])
    assert after_TKGD[problem.rows(broken)][seen, 0].isnan().all()
    after_TKGD[problem.rows(broken)][seen, 0] = before_TKGD[problem.rows(broken)][seen, 0]
    assert torch.equal(after_TKGD, before_TKGD)


@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx", pytest.param("-mno-f16c -mno-avx512f", marks=pytest.mark.lab)])
def test_narrower_registers_compute_the_same(compiled_with: Callable[[str], NativeKernels], option: str) -> None:
    narrow = compiled_with(option)
    for kind in KINDS:
        problem = make(narrow, (2, 3, 48), kind=kind, window=100, dtype=torch.float16)
        check(narrow, problem, every=31)
        check(narrow, make(narrow, (1, 8, 64), kind=kind), every=31)
        whole_TKGD = problem.solve(narrow)
        for s, num_new in enumerate(NEW):
            part = problem.part(s, num_new - 1, 1)
            assert torch.equal(part.solve(narrow)[part.rows(0)], whole_TKGD[part.rows(0)])
