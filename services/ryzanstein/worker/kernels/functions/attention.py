"""Attention over keys and values in pages, where it finds them and which it reads, and the compression of pages.

Legend: T tokens, S sequences, K key-value heads, G query heads of a group, H heads, D head dimension, N slots
of the cache, C columns of a slot, B cold blocks or blocks of the longest table, X bytes of a block, M pages, P positions.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.cold_layout import ColdLayout, ItemKind
from ryzanstein.worker.kernels.functions.declaring import declared


@dataclass(frozen=True, slots=True)
class ColdKeys:
    """The tables of cold blocks, as `PagedKeys` has those of hot pages.

    A query at position p sees page j cold if p - (16 j + 15) is at least `hot_tokens`.
    """

    tables_SB: Tensor
    layout: ColdLayout
    hot_tokens: int
    first_S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SparseKeys:
    """What is read of the keys before the window, in pages: see `SparseRule`.

    Without `quest`, a table begins with the lasting pages that are before page `first_S`.
    """

    sinks: int = 0
    stride: int = 0
    quest: int = 0


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """The sequences with new tokens, as int64.

    For each: its first row in the step, its number of new tokens, its block table, and its number
    of keys. A new token sees itself and the keys before it, at most `window` keys including itself.
    `bias_HP` is added to a head's scores by the key's position. `first_S`: the page, by position, of
    which a table's first entry is; without it 0. `cold`: keys of older pages are there, and the
    tables are of hot pages only. Only keys of positions from `begin_S` on and before `end_S` count,
    where they are given; a token that sees none has the answer 0. `sparse`: of the keys before the
    window some are read, too; then there are neither `cold` keys nor a bias.
    """

    rows_S: Tensor
    num_new_S: Tensor
    tables_SB: Tensor
    length_S: Tensor
    block_size: int
    window: int | None = None
    bias_HP: Tensor | None = None
    first_S: Tensor | None = None
    cold: ColdKeys | None = None
    begin_S: Tensor | None = None
    end_S: Tensor | None = None
    sparse: SparseKeys | None = None


ITEM_KINDS: dict[ItemKind, int] = {"float16": 1, "fp8": 2, "int8": 3, "int8-channels": 4}
"""The ids of attention_pages.h."""


class AttentionStruct(Structure):
    """The struct Attention of attention_team.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "pages", "cold", "rows", "num_new", "length", "tables", "first")),
        *((name, c_void_p) for name in ("cold_tables", "cold_first", "begin", "end", "bias", "sink", "bounds", "out", "lse")),
        *((name, c_int64) for name in ("q_stride", "out_stride", "columns", "values", "num_pages", "num_cold")),
        *((name, c_int64) for name in ("block_size", "num_sequences", "num_kv_heads", "group", "head_dim")),
        *((name, c_int64) for name in ("num_positions", "half", "key_kind", "value_kind", "hot", "window")),
        *((name, c_int64) for name in ("sparse", "sinks", "stride", "quest")),
        *((name, c_float) for name in ("scale", "cap")),
    )


class _Seal(Structure):
    """The struct Seal of attention_seal.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("pages", "cold", "hot_pages", "cold_blocks")),
        *((name, c_int64) for name in ("columns", "values", "num_pages", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("half", "key_kind", "value_kind")),
    )


class AttentionFunctions:
    """The functions of attention.c and attention_seal.c."""

    def __init__(self, library: CDLL) -> None:
        self._attend = declared(library, "attend", POINTER(AttentionStruct), returns=c_int)
        self._seal = declared(library, "seal", POINTER(_Seal), returns=c_int)

    def attend(
        self,
        q_TKGD: Tensor,
        pages_NC: Tensor,
        keys: PagedKeys,
        scoring: tuple[float, float | None],
        out_TKGD: Tensor,
        *,
        cold_BX: Tensor | None = None,
        bounds_B2Y: Tensor | None = None,
        sinks_KG: Tensor | None = None,
        lse_TKG: Tensor | None = None,
        beyond: int = 0,
    ) -> None:
        """Fills the sequences' rows of `out_TKGD`. Raises MemoryError.

        `scoring` is the scale and the cap of the scores. `cold_BX` are the layer's cold blocks, needed
        where `keys` has tables of them; `bounds_B2Y`, needed by `quest`, the least and the greatest keys of
        full blocks, float32. `sinks_KG` are scores that the heads' softmax counts and that have no values,
        float32. `lse_TKG` gets the logarithm of each row's sum of exponentials. Values are at the end of a slot, or
        `beyond` numbers behind that.
        """
        arguments = _arguments(q_TKGD, pages_NC, keys, scoring, out_TKGD)
        arguments.values += beyond
        if keys.cold is not None and cold_BX is not None:
            arguments.cold = cold_BX.data_ptr()
            ask_cold(arguments, keys.cold)
        if keys.sparse is not None:
            arguments.bounds = _pointer(bounds_B2Y)
        arguments.sink = _pointer(sinks_KG)
        if lse_TKG is not None:
            arguments.lse = lse_TKG.data_ptr()
        if self._attend(byref(arguments)):
            raise MemoryError("no memory for the scores of attention")

    def seal(self, pages_NC: Tensor, hot_M: Tensor, cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> None:
        """Compresses pages of 16 slots into cold blocks, uint8. Raises MemoryError.

        `hot_M` are numbers of pages, `cold_M` those of blocks, as int64.
        """
        columns, width = pages_NC.shape[1], layout.num_kv_heads * layout.head_dim
        arguments = _Seal(
            *(pages_NC.data_ptr(), cold_BX.data_ptr(), hot_M.data_ptr(), cold_M.data_ptr()),
            *(columns, columns - width, len(hot_M), layout.num_kv_heads, layout.head_dim),
            *(pages_NC.dtype == torch.float16, ITEM_KINDS[layout.kind.keys], ITEM_KINDS[layout.kind.values]),
        )
        if self._seal(byref(arguments)):
            raise MemoryError("no memory to seal pages")


def ask(arguments: AttentionStruct, keys: PagedKeys) -> None:
    """Sets what all layers of a group read in a step, but for compressed blocks."""
    arguments.rows, arguments.num_new = keys.rows_S.data_ptr(), keys.num_new_S.data_ptr()
    arguments.length, arguments.tables = keys.length_S.data_ptr(), keys.tables_SB.data_ptr()
    arguments.first, arguments.begin, arguments.end = map(_pointer, (keys.first_S, keys.begin_S, keys.end_S))
    arguments.num_sequences, arguments.num_pages = keys.tables_SB.shape
    arguments.block_size, arguments.window = keys.block_size, keys.window or 0
    arguments.bias, arguments.num_positions = _pointer(keys.bias_HP), 0 if keys.bias_HP is None else keys.bias_HP.shape[1]
    arguments.sparse = keys.sparse is not None
    if keys.sparse is not None:
        arguments.sinks, arguments.stride, arguments.quest = keys.sparse.sinks, keys.sparse.stride, keys.sparse.quest


def ask_cold(arguments: AttentionStruct, cold: ColdKeys) -> None:
    """Sets where a group's compressed blocks are."""
    kind = cold.layout.kind
    arguments.cold_tables = cold.tables_SB.data_ptr()
    arguments.cold_first, arguments.num_cold = _pointer(cold.first_S), cold.tables_SB.shape[1]
    arguments.key_kind, arguments.value_kind = ITEM_KINDS[kind.keys], ITEM_KINDS[kind.values]
    arguments.hot = cold.hot_tokens


def _arguments(
    q_TKGD: Tensor, pages_NC: Tensor, keys: PagedKeys, scoring: tuple[float, float | None], out_TKGD: Tensor
) -> AttentionStruct:
    scale, cap = scoring
    num_kv_heads, group, head_dim = q_TKGD.shape[1:]
    columns = pages_NC.shape[1]
    arguments = AttentionStruct(
        q=q_TKGD.data_ptr(),
        pages=pages_NC.data_ptr(),
        out=out_TKGD.data_ptr(),
        q_stride=q_TKGD.stride(0),
        out_stride=out_TKGD.stride(0),
        columns=columns,
        values=columns - num_kv_heads * head_dim,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        half=pages_NC.dtype == torch.float16,
        scale=scale,
        cap=cap or 0.0,
    )
    ask(arguments, keys)
    return arguments


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
