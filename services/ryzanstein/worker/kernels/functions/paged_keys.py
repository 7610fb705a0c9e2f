"""Where attention finds the keys and values of each sequence, and which of them it reads.

Legend: S sequences, B blocks of the longest table, H heads, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ryzanstein.worker.kernels.functions.cold_layout import ColdLayout


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
