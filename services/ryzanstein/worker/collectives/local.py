"""Collectives of a single rank: there is nothing to exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ryzanstein.worker.collectives.meeting import Meeting

if TYPE_CHECKING:
    from torch import Tensor

    from ryzanstein.worker.collectives.meeting import NativeMeeting


class LocalCollectives:
    """A group of one rank. `board`: where C code reports what a step computes, see `CollectiveProgress.address`."""

    def __init__(self, board: int | None = None) -> None:
        self.meeting = None if board is None else Meeting(board=board, size=1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def gather_to_root(self, x: Tensor, dim: int = -1) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def rejoin(self) -> None:
        pass

    def use(self, native: NativeMeeting | None) -> None:
        pass

    def close(self) -> None:
        pass
