"""Cold pages in torch's operators: the fallback where our own kernels do not run, and their judge.

Legend: M pages, J tokens of a page, K key-value heads, D head dimension, N hot slots, B cold blocks,
X bytes of a block, P bytes of a head's part, L keys of a sequence, n new tokens, G query heads of a
group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.worker.model.cold_layout import PAGE_TOKENS, PART_HEAD_BYTES, ColdLayout, ItemKind, sees_cold
from ryzanstein.worker.model.kernels.native import ColdKeys, PagedKeys

_GREATEST: dict[ItemKind, float] = {"fp8": 448.0, "int8": 127.0}
_DTYPES: dict[ItemKind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "float16": torch.float16}
_SMALLEST = torch.finfo(torch.float32).tiny


def seal_pages(pages_NC: Tensor, hot_M: Tensor, cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> None:
    """Compresses pages into cold blocks, as `NativeKernels.seal` does."""
    columns, width = pages_NC.shape[1], layout.num_kv_heads * layout.head_dim
    slots_MJ = hot_M.unsqueeze(1) * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=hot_M.device)
    page_MJC = pages_NC[slots_MJ].float()
    keys_MKDJ, values_MKJD = (
        part.unflatten(2, (layout.num_kv_heads, layout.head_dim)).permute(order)
        for part, order in (
            (page_MJC[..., :width], (0, 2, 3, 1)),
            (page_MJC[..., columns - width :], (0, 2, 1, 3)),
        )
    )
    parts_MKP = torch.zeros((len(hot_M), layout.num_kv_heads, layout.part_bytes), dtype=torch.uint8, device=cold_BX.device)
    coded, scale_MK = _encoded(keys_MKDJ, layout.kind.keys)
    parts_MKP[..., :4] = scale_MK.unsqueeze(-1).view(torch.uint8)
    parts_MKP[..., PART_HEAD_BYTES : layout.values_offset] = coded.contiguous().view(torch.uint8).flatten(2)
    coded, scale_MK = _encoded(values_MKJD, layout.kind.values)
    parts_MKP[..., 4:8] = scale_MK.unsqueeze(-1).view(torch.uint8)
    rows_MKJV = parts_MKP[..., layout.values_offset :].unflatten(2, (PAGE_TOKENS, -1))
    rows_MKJV[..., : layout.head_dim] = coded.contiguous().view(torch.uint8)
    cold_BX[cold_M] = parts_MKP.flatten(1)


def open_pages(cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of blocks, [M J, K, D] in float32."""
    parts_MKP = cold_BX[cold_M].unflatten(1, (layout.num_kv_heads, layout.part_bytes))
    coded = parts_MKP[..., PART_HEAD_BYTES : layout.values_offset].contiguous().view(_DTYPES[layout.kind.keys])
    keys_MKDJ = coded.float().unflatten(2, (layout.head_dim, PAGE_TOKENS)) * _scale(parts_MKP, 0)
    coded = parts_MKP[..., layout.values_offset :].contiguous().view(_DTYPES[layout.kind.values])
    values_MKJV = coded.float().unflatten(2, (PAGE_TOKENS, -1)) * _scale(parts_MKP, 4)
    keys_LKD = keys_MKDJ.permute(0, 3, 1, 2).flatten(0, 1)
    return keys_LKD, values_MKJV[..., : layout.head_dim].permute(0, 2, 1, 3).flatten(0, 1)


def attend_zones(
    q_TKGD: Tensor,
    pages_NC: Tensor,
    cold_BX: Tensor | None,
    keys: PagedKeys,
    scoring: tuple[float, float | None],
    out_TKGD: Tensor,
    lse_TKG: Tensor | None = None,
) -> None:
    """Computes what `NativeKernels.attend` does.

    The new tokens of a sequence that see the same pages cold are computed together.
    """
    for s, (first, num_new, length) in enumerate(
        zip(keys.rows_S.tolist(), keys.num_new_S.tolist(), keys.length_S.tolist(), strict=True)
    ):
        start = 0
        while start < num_new:
            position = length - num_new + start
            pages = 0 if keys.cold is None else sees_cold(position, keys.cold.hot_tokens)
            border = num_new if keys.cold is None else (pages + 1) * PAGE_TOKENS + keys.cold.hot_tokens - 1 - (length - num_new)
            stop = min(num_new, max(start + 1, border))
            rows = slice(first + start, first + stop)
            seen = _seen(keys, s, position, position + stop - start)
            found = _keys_values(pages_NC, cold_BX, keys, s, pages, seen, q_TKGD.shape[1::2])
            out_TKGD[rows], lse_nKG = _attention(
                q_TKGD[rows], *found, _hidden(keys, s, seen, position, stop - start), keys, seen, scoring
            )
            if lse_TKG is not None:
                lse_TKG[rows] = lse_nKG
            start = stop


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


def _scale(parts_MKP: Tensor, offset: int) -> Tensor:
    return parts_MKP[..., offset : offset + 4].contiguous().view(torch.float32).unsqueeze(-1)


def _seen(keys: PagedKeys, s: int, position: int, end: int) -> range:
    """Returns the positions of keys that at least one of new tokens from `position` to before `end` sees."""
    begin = 0 if keys.window is None else max(0, position + 1 - keys.window)
    begin = begin if keys.begin_S is None else max(begin, int(keys.begin_S[s]))
    end = end if keys.end_S is None else min(end, int(keys.end_S[s]))
    return range(begin, max(begin, end))


def _keys_values(
    pages_NC: Tensor, cold_BX: Tensor | None, keys: PagedKeys, s: int, pages: int, seen: range, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns keys and values [L, K, D] of positions, those of the first `pages` pages from cold blocks."""
    border = min(max(pages * PAGE_TOKENS, seen.start), seen.stop)
    num_kv_heads, head_dim = shape
    hot = torch.arange(border, seen.stop, device=pages_NC.device)
    size, first = keys.block_size, 0 if keys.first_S is None else int(keys.first_S[s])
    slots = keys.tables_SB[s][hot // size - first] * size + hot % size
    hot_LC, width = pages_NC[slots].float(), num_kv_heads * head_dim
    found = [part.unflatten(1, (num_kv_heads, head_dim)) for part in (hot_LC[:, :width], hot_LC[:, -width:])]
    if border > seen.start and keys.cold is not None and cold_BX is not None:
        cold = _cold_keys_values(cold_BX, keys.cold, s, range(seen.start, border))
        found = [torch.cat(pair) for pair in zip(cold, found, strict=True)]
    return found[0], found[1]


def _cold_keys_values(cold_BX: Tensor, cold: ColdKeys, s: int, seen: range) -> tuple[Tensor, Tensor]:
    pages = torch.arange(seen.start // PAGE_TOKENS, -(-seen.stop // PAGE_TOKENS), device=cold_BX.device)
    first = 0 if cold.first_S is None else int(cold.first_S[s])
    skip = seen.start % PAGE_TOKENS
    k_LKD, v_LKD = open_pages(cold_BX, cold.tables_SB[s][pages - first], cold.layout)
    return k_LKD[skip : skip + len(seen)], v_LKD[skip : skip + len(seen)]


def _hidden(keys: PagedKeys, s: int, seen: range, position: int, count: int) -> Tensor:
    """Returns which keys a new token does not see, [n, L]."""
    own_n1 = torch.arange(position, position + count).unsqueeze(1)
    positions_L = torch.arange(seen.start, seen.stop)
    hidden_nL = positions_L > own_n1
    return hidden_nL if keys.window is None else hidden_nL | (positions_L <= own_n1 - keys.window)


def _attention(
    q_nKGD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    hidden_nL: Tensor,
    keys: PagedKeys,
    seen: range,
    scoring: tuple[float, float | None],
) -> tuple[Tensor, Tensor]:
    """Returns the answers, and the logarithms of the sums of exponentials [n, K, G]."""
    scale, cap = scoring
    scores_nKGL = torch.einsum("nkgd,lkd->nkgl", q_nKGD.float(), k_LKD).mul_(scale)
    if cap is not None:
        scores_nKGL = scores_nKGL.div_(cap).tanh_().mul_(cap)
    if keys.bias_HP is not None:
        scores_nKGL += keys.bias_HP[:, seen.start : seen.stop].unflatten(0, q_nKGD.shape[1:3])
    scores_nKGL.masked_fill_(hidden_nL[:, None, None].to(scores_nKGL.device), -torch.inf)
    lse_nKG = scores_nKGL.logsumexp(-1)
    weights_nKGL = scores_nKGL.softmax(-1).masked_fill_(
        (lse_nKG == -torch.inf).unsqueeze(-1) & hidden_nL.all(1)[:, None, None, None], 0
    )
    return torch.einsum("nkgl,lkd->nkgd", weights_nKGL, v_LKD).to(q_nKGD.dtype), lse_nKG
