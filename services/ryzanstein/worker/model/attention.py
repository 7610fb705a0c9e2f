"""Attention of a step's queries over paged keys and values.

It is one call of our own kernel, or a few calls of scaled_dot_product_attention. `inputs` divides
each step into a list of segments once; each layer then only runs them. The query heads of a group
are rows (decode) or a batch over shared keys (prefill): key-value heads are never copied per query
head.

Legend: T tokens, S sequences, L keys of a sequence, P keys of the longest, n new tokens of one
sequence, K key-value heads, G query heads of a group, D head dimension, N cache slots, C = 2 K D
columns of a slot (K D if the keys are also the values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions, PagedKeys


@dataclass(frozen=True, slots=True)
class Scoring:
    """A rule that turns query-key products into scores.

    They are multiplied by `scale`, then squashed into the range from -`cap` to `cap`. `sinks_KG` are scores
    that each head's softmax counts as well; they have no values.
    """

    scale: float
    cap: float | None = None
    sinks_KG: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence: its new tokens are the `num_new` rows of the step that start at `first`.

    Its keys are the slots in `keys`: a slice if its blocks are adjacent, so that the keys are a
    view and not a copy. `mask` is added to the scores. Its shape is [n, L] or [G, K, n, L]; for a
    single token it is [1, K, G, L], or None if the token sees all keys alike. `causal` replaces the
    mask of a whole prompt, L = n: masked scores are not computed at all.
    """

    first: int
    num_new: int
    keys: slice | Tensor
    mask: Tensor | None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch of sequences stored `stride` slots apart, starting at `first_slot`.

    The slots that are read are copied to the slots `to_N`.
    """

    first_slot: int
    stride: int
    to_N: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Several sequences with one new token each, in one padded call.

    `rows_S` is None if they are the whole step. `slots_N` are the slots to read: every key of the
    padded batch or, for a staged batch, the keys that the staging area does not have yet. Padding
    refers to a slot that is always zero: a NaN key would spoil the sum even if masked.
    """

    rows_S: Tensor | None
    num_sequences: int
    slots_N: Tensor
    mask: Tensor  # [S, 1, 1, P] or [S, K, G, P]
    staged: Staged | None


@dataclass(frozen=True, slots=True)
class Paged:
    """All sequences of a step, with keys that are read in place."""

    kernels: AttentionFunctions
    keys: PagedKeys


Segment = Span | AttentionBatch | Paged


def attend(q_TKGD: Tensor, pages: LayerPages, segments: Sequence[Segment], scoring: Scoring, out_TKGD: Tensor) -> None:
    """Fills `out_TKGD`. Every token must belong to exactly one segment."""
    for segment in segments:
        if isinstance(segment, Paged):
            segment.kernels.attend(
                *(q_TKGD, pages.slots_NC, segment.keys, (scoring.scale, scoring.cap), out_TKGD),
                cold_BX=pages.cold_BX,
                bounds_B2Y=pages.bounds_B2Y,
                sinks_KG=scoring.sinks_KG,
                beyond=pages.beyond,
            )
        elif isinstance(segment, AttentionBatch):
            _attend_batch(q_TKGD, pages, segment, scoring, out_TKGD)
        else:
            _attend_span(q_TKGD, pages, segment, scoring, out_TKGD)


def _attend_span(q_TKGD: Tensor, pages: LayerPages, span: Span, scoring: Scoring, out_TKGD: Tensor) -> None:
    rows = slice(span.first, span.first + span.num_new)
    read_LC = pages.select(span.keys)
    k_1KLD, v_1KLD = _keys_values(read_LC, 0, (1, len(read_LC)), q_TKGD)
    if span.num_new == 1:
        out_TKGD[rows] = _attention(q_TKGD[rows], k_1KLD, v_1KLD, span.mask, scoring)
        return
    q_GKnD = q_TKGD[rows].permute(2, 1, 0, 3)
    k_GKLD, v_GKLD = (shared.expand(len(q_GKnD), -1, -1, -1) for shared in (k_1KLD, v_1KLD))
    if span.causal:
        out_GKnD = F.scaled_dot_product_attention(q_GKnD, k_GKLD, v_GKLD, is_causal=True, scale=scoring.scale)
    else:
        out_GKnD = _attention(q_GKnD, k_GKLD, v_GKLD, span.mask, scoring, by_group=True)
    out_TKGD[rows] = out_GKnD.permute(2, 1, 0, 3)


def _attend_batch(q_TKGD: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring, out_TKGD: Tensor) -> None:
    k_SKPD, v_SKPD = _batch_keys_values(q_TKGD, pages, batch)
    if batch.rows_S is None:
        out_TKGD.copy_(_attention(q_TKGD, k_SKPD, v_SKPD, batch.mask, scoring))
        return
    q_SKGD = q_TKGD.index_select(0, batch.rows_S)
    out_TKGD.index_copy_(0, batch.rows_S, _attention(q_SKGD, k_SKPD, v_SKPD, batch.mask, scoring))


def _batch_keys_values(q_TKGD: Tensor, pages: LayerPages, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    pages_NC, read_NC = pages.slots_NC, pages.select(batch.slots_N)
    lengths = batch.num_sequences, batch.mask.shape[-1]
    if batch.staged is None:
        return _keys_values(read_NC, 0, lengths, q_TKGD)
    pages_NC.index_copy_(0, batch.staged.to_N, read_NC)
    return _keys_values(pages_NC, batch.staged.first_slot, lengths, q_TKGD, batch.staged.stride)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, *, by_group: bool = False) -> Tensor:
    """Returns the attention output, [.., rows, D]. The fused kernel supports neither a cap nor sinks.

    Queries are [S, K, G, D], or [G, K, n, D] with `by_group`.
    """
    if scoring.cap is None and scoring.sinks_KG is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    scores = q @ k.transpose(-1, -2)
    if scoring.cap is None:
        scores.mul_(scoring.scale)
    else:
        scores.mul_(scoring.scale / scoring.cap).tanh_().mul_(scoring.cap)
    if mask is not None:
        scores = scores.add_(mask)
    if scoring.sinks_KG is None:
        return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    sinks = scoring.sinks_KG.t()[:, :, None, None] if by_group else scoring.sinks_KG[None, :, :, None]
    with_sinks = torch.cat((scores.float(), sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return with_sinks.softmax(dim=-1)[..., :-1].to(v.dtype) @ v


def _keys_values(
    slots_NC: Tensor, first: int, lengths: tuple[int, int], q_TKGD: Tensor, apart: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns keys and values [S, K, P, D] of S x P slots (`lengths`) that start at `first`.

    A slot begins with its keys and ends with its values. The sequences are adjacent, or start
    `apart` slots from each other. The results are views, or copies if the cache's dtype is not the
    queries'.

    Each view takes one call instead of a chain of slices: for a short sequence the chain costs as
    much as its attention.
    """
    (num_sequences, length), width = lengths, slots_NC.shape[1]
    num_kv_heads, head_dim = q_TKGD.shape[1], q_TKGD.shape[3]
    size, stride = (num_sequences, num_kv_heads, length, head_dim), ((apart or length) * width, head_dim, width, 1)
    offset = slots_NC.storage_offset() + first * width
    to_values = width - num_kv_heads * head_dim
    keys, values = slots_NC.as_strided(size, stride, offset), slots_NC.as_strided(size, stride, offset + to_values)
    return keys.to(q_TKGD.dtype), values.to(q_TKGD.dtype)
