"""Sparse attention against dense attention in float64 with a mask: lasting pages, pages chosen by query, tables with holes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.cache.kv_cache import bound_blocks
from ryzanstein.worker.engine.extents import Extents, Lasting
from ryzanstein.worker.kernels.functions.attention import PagedKeys, SparseKeys
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.settings.sparse import SparseRule

LENGTHS = (1, 33, 130, 401)
RULES = (
    SparseRule(48, sinks=16),
    SparseRule(50, sinks=40),
    SparseRule(40, stride=3),
    SparseRule(33, sinks=20, stride=2),
    SparseRule(16),
)
QUESTS = (SparseRule(30, quest=4), SparseRule(16, sinks=20, quest=1), SparseRule(48, sinks=16, quest=7))


@dataclass(frozen=True)
class Case:
    """Sequences with all of their tokens as queries, [S][L, K, G, D], and the keys of their pages, scattered."""

    q: list[Tensor]
    keys_values: list[Tensor]  # [S][L, 2, K, D]
    tables: list[list[int]]
    slots_NC: Tensor
    bounds_B2Y: Tensor
    size: int


@pytest.fixture(scope="module")
def case(normal: Callable[..., Tensor]) -> Callable[..., Case]:
    def make(
        heads: tuple[int, int, int],
        size: int = 16,
        dtype: torch.dtype = torch.float32,
        lengths: tuple[int, ...] = LENGTHS,
    ) -> Case:
        num_kv_heads, group, head_dim = heads
        pages = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).tolist()
        tables = [order[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(pages))]
        slots_NC = torch.full((sum(pages) * size + 1, 2 * num_kv_heads * head_dim), torch.nan, dtype=dtype)
        q, keys_values = [], []
        for s, length in enumerate(lengths):
            q.append(normal(s, length, num_kv_heads, group, head_dim))
            kv_LC = normal(20 + s, length, slots_NC.shape[1]).to(dtype)
            keys_values.append(kv_LC.view(length, 2, num_kv_heads, head_dim))
            positions_L = torch.arange(length)
            slots_NC[torch.tensor(tables[s])[positions_L // size] * size + positions_L % size] = kv_LC
        bounds_B2Y = torch.full((sum(pages), 2, num_kv_heads * head_dim), torch.nan)
        bound_blocks(slots_NC, bounds_B2Y, torch.arange(sum(pages)), size)
        return Case(q, keys_values, tables, slots_NC, bounds_B2Y, size)

    return make


def solve(kernels: NativeKernels, case: Case, rule: SparseRule, fed: list[tuple[int, int, int]]) -> Tensor:
    """The answers of tokens `begin` to `end` - 1 of sequences, side by side. What left the window is not in the tables."""
    extents = Extents((rule.window,), case.size, lasting=(Lasting(rule.sinks, rule.stride),))
    tables, firsts = [], []
    for s, begin, end in fed:
        first = 0 if rule.quest else extents.first_seen(rule.window, begin)
        lasting = list(extents.lasting_pages(extents.lasting[0], first))
        assert len(lasting) == extents.num_lasting(extents.lasting[0], first)
        pages = [*lasting, *range(first, extents.pages(end))]
        tables.append([case.tables[s][page] for page in pages])
        firsts.append(first)
    width = max(map(len, tables))
    num_new = torch.tensor([end - begin for _, begin, end in fed])
    keys = PagedKeys(
        num_new.cumsum(0) - num_new,
        num_new,
        torch.tensor([table + [1 << 40] * (width - len(table)) for table in tables]),
        torch.tensor([end for _, _, end in fed]),
        case.size,
        rule.window,
        first_S=torch.tensor(firsts),
        sparse=SparseKeys(extents.pages(rule.sinks), rule.stride, rule.quest),
    )
    q_TKGD = torch.cat([case.q[s][begin:end] for s, begin, end in fed])
    out_TKGD = torch.full(q_TKGD.shape, 99.0)
    scoring = (q_TKGD.shape[-1] ** -0.5, None)
    kernels.attention.attend(q_TKGD, case.slots_NC, keys, scoring, out_TKGD, bounds_B2Y=case.bounds_B2Y)
    return out_TKGD


def seen(case: Case, rule: SparseRule, s: int, q_KGD: Tensor, position: int) -> Tensor:
    """Which keys a query sees, [K, G, L], by the definitions and nothing else."""
    size, length = case.size, len(case.q[s])
    positions_L = torch.arange(length)
    sinks = -(-rule.sinks // size)
    begin = max(0, position - rule.window + 1)
    if rule.quest:
        begin = begin // size * size
    seen_L = positions_L >= begin
    seen_L |= positions_L // size < sinks
    if rule.stride:
        seen_L |= positions_L // size % rule.stride == 0
    seen_KGL = seen_L.expand(*q_KGD.shape[:2], length).clone()
    pages = range(sinks, begin // size)
    if rule.quest and pages:
        k_PSKD = case.keys_values[s][:begin, 0].float().reshape(-1, size, *q_KGD.shape[::2])
        least_KP, greatest_KP = (k_PKD.transpose(0, 1)[:, None] for k_PKD in (k_PSKD.amin(1)[sinks:], k_PSKD.amax(1)[sinks:]))
        q_KG1D = q_KGD[:, :, None]
        bounds_KGP = torch.maximum(q_KG1D * least_KP, q_KG1D * greatest_KP)
        for page in bounds_KGP.double().sum(-1).topk(min(rule.quest, len(pages)), dim=-1).indices.unbind(-1):
            seen_KGL |= positions_L // size == (page + sinks)[..., None]
    return seen_KGL & (positions_L <= position)


def exact(case: Case, rule: SparseRule, s: int, position: int) -> Tensor:
    """[K, G, D] in float64."""
    q_KGD = case.q[s][position]
    k_LKD, v_LKD = case.keys_values[s].double().unbind(1)
    scores_KGL = torch.einsum("kgd,lkd->kgl", q_KGD.double(), k_LKD) * q_KGD.shape[-1] ** -0.5
    scores_KGL = scores_KGL.masked_fill(~seen(case, rule, s, q_KGD, position), -torch.inf)
    return torch.einsum("kgl,lkd->kgd", scores_KGL.softmax(-1), v_LKD)


@pytest.mark.parametrize("rule", [*RULES, *QUESTS], ids=str)
@pytest.mark.parametrize("heads", [(1, 4, 16), (2, 3, 20), (3, 1, 64)], ids=str)
def test_a_query_reads_what_the_rule_says(
    kernels: NativeKernels, case: Callable[..., Case], heads: tuple[int, int, int], rule: SparseRule
) -> None:
    made = case(heads)
    whole = [(s, 0, length) for s, length in enumerate(LENGTHS)]
    out_TKGD = solve(kernels, made, rule, whole)
    expected = [exact(made, rule, s, position) for s, length in enumerate(LENGTHS) for position in range(length)]
    torch.testing.assert_close(out_TKGD.double(), torch.stack(expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("size", "dtype"), [(4, torch.float32), (7, torch.float32), (16, torch.float16)], ids=str)
@pytest.mark.parametrize("rule", [RULES[1], RULES[3], QUESTS[2]], ids=str)
def test_other_pages_and_halves(
    kernels: NativeKernels, case: Callable[..., Case], rule: SparseRule, size: int, dtype: torch.dtype
) -> None:
    made = case((2, 2, 32), size, dtype)
    out_TKGD = solve(kernels, made, rule, [(3, 0, LENGTHS[3])])
    expected = torch.stack([exact(made, rule, 3, position) for position in range(LENGTHS[3])])
    torch.testing.assert_close(out_TKGD.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rule", [*RULES, *QUESTS], ids=str)
def test_a_row_has_the_same_bits_alone_in_any_chunk_and_in_company(
    kernels: NativeKernels, case: Callable[..., Case], rule: SparseRule
) -> None:
    made, length = case((2, 3, 20)), LENGTHS[3]
    whole = solve(kernels, made, rule, [(3, 0, length)])
    alone = torch.cat([solve(kernels, made, rule, [(3, p, p + 1)]) for p in range(length)])
    assert torch.equal(whole, alone)
    for cuts in ((0, 100, 163, 400, length), (0, 7, 250, 399, length)):
        pieces = [(3, begin, end) for begin, end in pairwise(cuts)]
        parts = [solve(kernels, made, rule, [(2, 80, 130), piece, (1, 32, 33)])[50:-1] for piece in pieces]
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("rule", [*RULES, *QUESTS], ids=str)
def test_while_nothing_is_left_out_the_bits_are_those_of_dense_attention(
    kernels: NativeKernels, case: Callable[..., Case], rule: SparseRule
) -> None:
    made = case((2, 3, 20))
    end = rule.window + (-(-rule.sinks // 16) + rule.quest) * 16 if rule.quest else rule.window
    dense = solve(kernels, made, SparseRule(1 << 20), [(3, 0, LENGTHS[3])])
    sparse = solve(kernels, made, rule, [(3, 0, LENGTHS[3])])
    assert torch.equal(dense[:end], sparse[:end])
    assert not torch.equal(dense[end + 16 :], sparse[end + 16 :])


@pytest.mark.parametrize(
    "rule", [SparseRule(300, stride=2), SparseRule(300, sinks=300), SparseRule(300, sinks=16, quest=30)], ids=str
)
def test_the_number_of_threads_changes_no_bit(
    kernels: NativeKernels,
    case: Callable[..., Case],
    threads: Callable[[int], AbstractContextManager[None]],
    rule: SparseRule,
) -> None:
    """Several threads read one sequence, each some parts of what the rule leaves of it."""
    made = case((1, 3, 20), lengths=(1500, 40))
    for fed in ([(0, 1499, 1500)], [(0, 1480, 1500), (1, 0, 40)]):
        with threads(1):
            alone = solve(kernels, made, rule, fed)
        torch.testing.assert_close(alone[0].double(), exact(made, rule, 0, fed[0][1]), rtol=1e-5, atol=2e-6)
        for count in (2, 3):
            with threads(count):
                assert torch.equal(solve(kernels, made, rule, fed), alone)


def test_equal_bounds_are_taken_in_the_order_of_pages_and_what_is_no_number_shows(
    kernels: NativeKernels, case: Callable[..., Case]
) -> None:
    # The window of the last query begins with a page.
    made, rule, last = case((1, 1, 16)), SparseRule(16, quest=2), LENGTHS[3] - 2
    k_LD = made.keys_values[3][:, 0, 0]
    same = k_LD[:16].clone()
    values = torch.arange(LENGTHS[3], dtype=torch.float32)[:, None].expand(-1, 16)
    for page in range(LENGTHS[3] // 16):
        block = made.tables[3][page]
        made.slots_NC[block * 16 : block * 16 + 16] = torch.cat((same, values[page * 16 : page * 16 + 16]), dim=1)
    bound_blocks(made.slots_NC, made.bounds_B2Y, torch.tensor(made.tables[3][: LENGTHS[3] // 16]), 16)
    answer = solve(kernels, made, rule, [(3, last, last + 1)])
    first = solve(kernels, made, SparseRule(16, sinks=32), [(3, last, last + 1)])
    torch.testing.assert_close(answer, first, rtol=1e-5, atol=1e-3)
    made.slots_NC[made.tables[3][9] * 16, 0] = torch.nan
    bound_blocks(made.slots_NC, made.bounds_B2Y, torch.tensor([made.tables[3][9]]), 16)
    assert solve(kernels, made, rule, [(3, last, last + 1)]).isnan().all()
