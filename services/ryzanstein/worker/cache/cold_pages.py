"""Cold pages in torch's operators: what our own kernels are compared with.

Legend: M pages, J tokens of a page, K key-value heads, D head dimension, N hot slots, B cold blocks,
X bytes of a block, P bytes of a head's part, L keys of a sequence, n new tokens, G query heads of a
group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.kernels.functions.attention import ColdKeys, PagedKeys
from ryzanstein.worker.kernels.functions.cold_layout import PAGE_TOKENS, PART_HEAD_BYTES, ColdLayout, ItemKind, sees_cold

_GREATEST: dict[ItemKind, float] = {"fp8": 448.0, "int8": 127.0}
_DTYPES: dict[ItemKind, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int8-channels": torch.int8,
    "float16": torch.float16,
}
_SMALLEST = torch.finfo(torch.float32).tiny


def seal_pages(pages_NC: Tensor, hot_M: Tensor, cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> None:
    """Compresses pages into cold blocks, as `AttentionFunctions.seal` does."""
    columns, width = pages_NC.shape[1], layout.num_kv_heads * layout.head_dim
    slots_MJ = hot_M.unsqueeze(1) * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=hot_M.device)
    page_MJC = pages_NC[slots_MJ].float()
    keys_MKDJ, values_MKJD = (
        part.reshape(-1, PAGE_TOKENS, layout.num_kv_heads, layout.head_dim).permute(order)
        for part, order in (
            (page_MJC[..., :width], (0, 2, 3, 1)),
            (page_MJC[..., columns - width :], (0, 2, 1, 3)),
        )
    )
    parts_MKP = torch.zeros((len(hot_M), layout.num_kv_heads, layout.part_bytes), dtype=torch.uint8, device=cold_BX.device)
    if layout.kind.keys == "int8-channels":
        coded, codes_MKD, scale_MK = _encoded_channels(keys_MKDJ)
        parts_MKP[..., PART_HEAD_BYTES : PART_HEAD_BYTES + layout.head_dim] = codes_MKD
    else:
        coded, scale_MK = _encoded(keys_MKDJ, layout.kind.keys)
    parts_MKP[..., :4] = scale_MK.unsqueeze(-1).view(torch.uint8)
    parts_MKP[..., layout.keys_offset : layout.values_offset] = coded.contiguous().view(torch.uint8).flatten(2)
    coded, scale_MK = _encoded(values_MKJD, layout.kind.values)
    parts_MKP[..., 4:8] = scale_MK.unsqueeze(-1).view(torch.uint8)
    rows_MKJV = parts_MKP[..., layout.values_offset :].view(len(hot_M), layout.num_kv_heads, PAGE_TOKENS, -1)
    rows_MKJV[..., : layout.head_dim] = coded.contiguous().view(torch.uint8)
    cold_BX[cold_M] = parts_MKP.flatten(1)


def open_pages(cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of blocks, [M J, K, D] in float32."""
    parts_MKP = cold_BX[cold_M].view(-1, layout.num_kv_heads, layout.part_bytes)
    coded = parts_MKP[..., layout.keys_offset : layout.values_offset].contiguous().view(_DTYPES[layout.kind.keys])
    keys_MKDJ = coded.float().view(*coded.shape[:2], layout.head_dim, PAGE_TOKENS) * _scale(parts_MKP, 0)
    if layout.kind.keys == "int8-channels":
        codes_MKD = parts_MKP[..., PART_HEAD_BYTES : PART_HEAD_BYTES + layout.head_dim].contiguous()
        keys_MKDJ = keys_MKDJ * codes_MKD.view(torch.float8_e4m3fn).float().unsqueeze(-1)
    coded = parts_MKP[..., layout.values_offset :].contiguous().view(_DTYPES[layout.kind.values])
    values_MKJV = coded.float().view(*coded.shape[:2], PAGE_TOKENS, -1) * _scale(parts_MKP, 4)
    keys_LKD = keys_MKDJ.permute(0, 3, 1, 2).flatten(0, 1)
    return keys_LKD, values_MKJV[..., : layout.head_dim].permute(0, 2, 1, 3).flatten(0, 1)


def attend_zones(
    q_TKGD: Tensor,
    pages: LayerPages,
    keys: PagedKeys,
    scoring: tuple[float, float | None],
    out_TKGD: Tensor,
    *,
    lse_TKG: Tensor | None = None,
) -> None:
    """Computes what `AttentionFunctions.attend` does.

    The new tokens of a sequence that see the same pages cold are computed together.
    """
    for s, (row, num_new, length) in enumerate(
        zip(keys.rows_S.tolist(), keys.num_new_S.tolist(), keys.length_S.tolist(), strict=True)
    ):
        first = length - num_new
        for part in _alike(keys.cold, first, length):
            rows = slice(row + part.start - first, row + part.stop - first)
            seen = _seen(keys, s, part)
            k_LKD, v_LKD = _keys_values(pages, keys, s, (part.start, seen), q_TKGD)
            scores_nKGL = _scores(q_TKGD[rows], k_LKD, keys, seen, scoring)
            scores_nKGL.masked_fill_(_hidden(keys.window, seen, part)[:, None, None], -torch.inf)
            lse_nKG = scores_nKGL.logsumexp(-1)
            weights_nKGL = scores_nKGL.softmax(-1)
            if not len(seen):
                weights_nKGL = torch.zeros_like(scores_nKGL)
            out_TKGD[rows] = torch.einsum("nkgl,lkd->nkgd", weights_nKGL, v_LKD).to(out_TKGD.dtype)
            if lse_TKG is not None:
                lse_TKG[rows] = lse_nKG


def _alike(cold: ColdKeys | None, begin: int, end: int) -> Iterator[range]:
    """Yields new tokens by position, together as long as they see the same pages cold."""
    while begin < end:
        stop = end
        if cold is not None:
            next_page = sees_cold(begin, cold.hot_tokens) + 1
            stop = min(end, next_page * PAGE_TOKENS + cold.hot_tokens - 1)
        yield range(begin, stop)
        begin = stop


def _encoded(x: Tensor, kind: ItemKind) -> tuple[Tensor, Tensor]:
    """Returns coded numbers of heads [M, K, ..], and each head's scale [M, K]."""
    if kind == "float16":
        return x.half(), torch.ones(x.shape[:2], device=x.device)
    largest_MK = x.abs().flatten(2).amax(-1)
    scale_MK = (largest_MK / _GREATEST[kind]).clamp_min(_SMALLEST)
    scale_MK[~largest_MK.isfinite()] = torch.nan
    scaled = x / scale_MK[..., None, None]
    if kind == "int8":
        return scaled.round().nan_to_num(0).to(torch.int8), scale_MK
    return scaled.to(torch.float8_e4m3fn), scale_MK


def _encoded_channels(x_MKDJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns coded keys, the code of each channel's scale [M, K, D], and each head's scale [M, K]."""
    largest_MKD = x_MKDJ.abs().amax(-1)
    largest_MK = largest_MKD.amax(-1)
    scale_MK = (largest_MK / 127 / 448).clamp_min(_SMALLEST)
    scale_MK[~largest_MK.isfinite()] = torch.nan
    wanted_MKD = largest_MKD / 127 / scale_MK.unsqueeze(-1)
    codes_MKD = wanted_MKD.clamp_max(448).to(torch.float8_e4m3fn)
    short_MKD = (codes_MKD.float() < wanted_MKD) & (codes_MKD.float() < 448)
    codes_MKD = (codes_MKD.view(torch.uint8) + short_MKD).view(torch.float8_e4m3fn)
    own_MKD1 = (codes_MKD.float() * scale_MK.unsqueeze(-1)).unsqueeze(-1)
    levels = (x_MKDJ / own_MKD1).round().nan_to_num(0, 0, 0).clamp(-127, 127).to(torch.int8)
    return levels, codes_MKD.view(torch.uint8), scale_MK


def _scale(parts_MKP: Tensor, offset: int) -> Tensor:
    return parts_MKP[..., offset : offset + 4].contiguous().view(torch.float32).unsqueeze(-1)


def _seen(keys: PagedKeys, s: int, part: range) -> range:
    """Returns the positions of keys that at least one of new tokens sees."""
    begin = 0 if keys.window is None else max(0, part.start + 1 - keys.window)
    begin = begin if keys.begin_S is None else max(begin, int(keys.begin_S[s]))
    end = part.stop if keys.end_S is None else min(part.stop, int(keys.end_S[s]))
    return range(begin, max(begin, end))


def _keys_values(pages: LayerPages, keys: PagedKeys, s: int, what: tuple[int, range], q_TKGD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [L, K, D] as a token at a position sees them: those of old pages from cold blocks."""
    position, seen = what
    num_pages = 0 if keys.cold is None else sees_cold(position, keys.cold.hot_tokens)
    border = min(max(num_pages * PAGE_TOKENS, seen.start), seen.stop)
    num_kv_heads, head_dim = q_TKGD.shape[1], q_TKGD.shape[3]
    hot_L, size = torch.arange(border, seen.stop), keys.block_size
    first = 0 if keys.first_S is None else int(keys.first_S[s])
    slots_L = keys.tables_SB[s][hot_L // size - first] * size + hot_L % size
    hot_LC, width = pages.slots_NC[slots_L].float(), num_kv_heads * head_dim
    found = [part.reshape(-1, num_kv_heads, head_dim) for part in (hot_LC[:, :width], hot_LC[:, -width:])]
    if border > seen.start and keys.cold is not None and pages.cold_BX is not None:
        cold = _cold_keys_values(pages.cold_BX, keys.cold, s, range(seen.start, border))
        found = [torch.cat(pair) for pair in zip(cold, found, strict=True)]
    return found[0], found[1]


def _cold_keys_values(cold_BX: Tensor, cold: ColdKeys, s: int, seen: range) -> tuple[Tensor, Tensor]:
    pages_M = torch.arange(seen.start // PAGE_TOKENS, -(-seen.stop // PAGE_TOKENS))
    first, skip = 0 if cold.first_S is None else int(cold.first_S[s]), seen.start % PAGE_TOKENS
    k_LKD, v_LKD = open_pages(cold_BX, cold.tables_SB[s][pages_M - first], cold.layout)
    return k_LKD[skip : skip + len(seen)], v_LKD[skip : skip + len(seen)]


def _hidden(window: int | None, seen: range, part: range) -> Tensor:
    """Returns which keys a new token does not see, [n, L]."""
    own_n1, positions_L = torch.arange(part.start, part.stop).unsqueeze(1), torch.arange(seen.start, seen.stop)
    hidden_nL = positions_L > own_n1
    return hidden_nL if window is None else hidden_nL | (positions_L <= own_n1 - window)


def _scores(q_nKGD: Tensor, k_LKD: Tensor, keys: PagedKeys, seen: range, scoring: tuple[float, float | None]) -> Tensor:
    scale, cap = scoring
    scores_nKGL = torch.einsum("nkgd,lkd->nkgl", q_nKGD.float(), k_LKD).mul_(scale)
    if cap is not None:
        scores_nKGL = scores_nKGL.div_(cap).tanh_().mul_(cap)
    if keys.bias_HP is not None:
        scores_nKGL += keys.bias_HP[:, seen.start : seen.stop].reshape(*q_nKGD.shape[1:3], -1)
    return scores_nKGL
