"""What ranks compute together. The backends say how: in one process, over shared memory, over gloo or NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CollectiveProgress(Protocol):
    """Hears of every collective, so that a rank that waits in one can be named."""

    def begin(self, op: str) -> None:
        """The rank enters the collective `op`."""
        ...

    def end(self) -> None:
        """The rank has left it."""
        ...

    def rejoined(self) -> None:
        """All ranks have given up a step and start together again: collectives count from 0."""
        ...


class Collectives(Protocol):
    """Operations that all ranks call in the same order with tensors of equal shape and dtype.

    Each raises CollectiveTimeout when a peer does not arrive before the deadline; the group is unusable from then on.
    PeerGaveUp: a peer has left the step; `rejoin` before anything else.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x`, which is contiguous, in place over all ranks; every rank gets the same bits. Returns `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x` in rank order, joined along `dim`."""
        ...

    def gather_to_root(self, x: Tensor, dim: int = -1) -> Tensor | None:
        """As all_gather, on rank 0 only; None elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrites `x`, which is contiguous, with rank 0's. Returns `x`."""
        ...

    def rejoin(self) -> None:
        """Gives up whatever this rank was in the middle of, and returns when all ranks have done so.

        Peers that wait in an operation, or come to one later, get PeerGaveUp. CannotRejoin: the backend has no way back.
        """
        ...

    def close(self) -> None:
        """Lets go of the transport. Peers that still wait run into their deadline."""
        ...


class CollectiveTimeout(Exception):
    """A peer did not arrive in time; the message names the operation, this rank and the missing one where it is known."""


class PeerGaveUp(Exception):
    """Another rank has left the step that this one is in."""


class OutOfStep(Exception):
    """Another rank is in another operation: one of them has left one out, and nothing that they compute is to be believed."""


class CannotRejoin(Exception):
    """A step that one rank has left cannot be left by the others: the group must start again."""


class NoProgress:
    """For callers that watch nothing."""

    def begin(self, op: str) -> None:
        pass

    def end(self) -> None:
        pass

    def rejoined(self) -> None:
        pass
