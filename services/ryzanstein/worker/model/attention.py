"""Attention of a step's queries over paged keys and values, made of few calls of scaled_dot_product_attention.

What to do is decided once a step (`inputs`) as a list of segments; each layer then only runs them. The query heads of a group
are rows (decode) or a batch over shared keys (prefill): key-value heads are never copied per query head.

Legend: T tokens, S sequences, B blocks of the longest, L keys of a sequence, P padded keys, n new tokens of one sequence,
K key-value heads, G query heads of a group, D head dimension, N cache slots, C = 2 K D columns of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence: its new tokens are `num_new` rows of the step from `first` on, its keys the first `length` of its blocks.

    `blocks_B` is None where the blocks lie one after the other from `first_slot` on: the keys are then a view, not a gather.
    `mask_nL` is None for a single token, which sees everything.
    """

    first: int
    num_new: int
    length: int
    block_size: int
    first_slot: int
    blocks_B: Tensor | None
    mask_nL: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Several sequences with one new token each, in one padded call. `rows_S` is None when they are the whole step."""

    rows_S: Tensor | None
    num_sequences: int
    block_size: int
    blocks_SB: Tensor  # flat
    mask_S11P: Tensor


Segment = Span | Batch


def attend(q_TKGD: Tensor, pages_NC: Tensor, segments: Sequence[Segment], out_TKGD: Tensor) -> None:
    """Fills `out_TKGD`; every token belongs to exactly one segment."""
    for segment in segments:
        if isinstance(segment, Batch):
            _attend_batch(q_TKGD, pages_NC, segment, out_TKGD)
        else:
            _attend_span(q_TKGD, pages_NC, segment, out_TKGD)


def _attend_span(q_TKGD: Tensor, pages_NC: Tensor, span: Span, out_TKGD: Tensor) -> None:
    k_KLD, v_KLD = _keys_values(q_TKGD, _span_pages(pages_NC, span))
    rows = slice(span.first, span.first + span.num_new)
    if span.mask_nL is None:
        out_TKGD[rows] = F.scaled_dot_product_attention(q_TKGD[rows], k_KLD, v_KLD)
        return
    q_GKnD = q_TKGD[rows].permute(2, 1, 0, 3)
    num_groups = len(q_GKnD)
    out_GKnD = F.scaled_dot_product_attention(
        q_GKnD, k_KLD.expand(num_groups, -1, -1, -1), v_KLD.expand(num_groups, -1, -1, -1), attn_mask=span.mask_nL
    )
    out_TKGD[rows] = out_GKnD.permute(2, 1, 0, 3)


def _span_pages(pages_NC: Tensor, span: Span) -> Tensor:
    if span.blocks_B is None:
        return pages_NC[span.first_slot : span.first_slot + span.length].unsqueeze(0)
    gathered = _by_block(pages_NC, span.block_size).index_select(0, span.blocks_B)
    return gathered.view(1, -1, pages_NC.shape[1])[:, : span.length]


def _attend_batch(q_TKGD: Tensor, pages_NC: Tensor, batch: Batch, out_TKGD: Tensor) -> None:
    gathered = _by_block(pages_NC, batch.block_size).index_select(0, batch.blocks_SB)
    k_SKPD, v_SKPD = _keys_values(q_TKGD, gathered.view(batch.num_sequences, -1, pages_NC.shape[1]))
    if batch.rows_S is None:
        out_TKGD.copy_(F.scaled_dot_product_attention(q_TKGD, k_SKPD, v_SKPD, attn_mask=batch.mask_S11P))
        return
    q_SKGD = q_TKGD.index_select(0, batch.rows_S)
    out_TKGD.index_copy_(0, batch.rows_S, F.scaled_dot_product_attention(q_SKGD, k_SKPD, v_SKPD, attn_mask=batch.mask_S11P))


def _by_block(pages_NC: Tensor, block_size: int) -> Tensor:
    return pages_NC.view(-1, block_size * pages_NC.shape[1])


def _keys_values(q_TKGD: Tensor, pages_SPC: Tensor) -> tuple[Tensor, Tensor]:
    """Views [S, K, P, D] of slots that hold their keys first, then their values."""
    num_kv_heads, head_dim = q_TKGD.shape[1], q_TKGD.shape[3]
    pages_SP2KD = pages_SPC.view(*pages_SPC.shape[:2], 2, num_kv_heads, head_dim)
    return pages_SP2KD[:, :, 0].transpose(1, 2), pages_SP2KD[:, :, 1].transpose(1, 2)
