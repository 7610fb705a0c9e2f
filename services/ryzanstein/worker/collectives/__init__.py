"""Operations that ranks compute together. Backends: one process, shared memory, gloo, NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ryzanstein.worker.collectives.meeting import Meeting, NativeMeeting


class CollectiveProgress(Protocol):
    """An observer of every collective, so that a rank that waits in one can be named."""

    def begin(self, op: str, size_bytes: int) -> None:
        """Reports that the rank enters the collective `op` with an operand of `size_bytes`."""
        ...

    @property
    def address(self) -> int | None:
        """Returns the rank's slot of the board, where C code reports in the same way (`meeting.c`); None: it does not."""
        ...

    def end(self) -> None:
        """Reports that the rank has left the collective."""
        ...

    def rejoined(self) -> None:
        """Reports that all ranks gave up a step and restart together: collectives count from 0."""
        ...


class Collectives(Protocol):
    """The operations, which all ranks call in the same order with tensors of equal shape and dtype.

    Each raises CollectiveTimeout if a peer does not arrive before the deadline; the group is
    unusable from then on. Each raises PeerGaveUp if a peer has left the step; call `rejoin` before
    anything else.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x`, which must be contiguous, in place over all ranks, and returns it.

        Every rank gets the same bits.
        """
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns every rank's `x` in rank order, joined along `dim`."""
        ...

    def gather_to_root(self, x: Tensor, dim: int = -1) -> Tensor | None:
        """Returns the result of all_gather on rank 0, None elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrites `x`, which must be contiguous, with rank 0's, and returns it."""
        ...

    def rejoin(self) -> None:
        """Gives up this rank's current operation, and returns when all ranks have done so.

        Peers that wait in an operation, or enter one later, get PeerGaveUp. Raises CannotRejoin if
        the backend does not support this.
        """
        ...

    @property
    def meeting(self) -> Meeting | None:
        """Returns the state that a step in C needs to sum over all ranks; None: it cannot."""
        ...

    def use(self, native: NativeMeeting | None) -> None:
        """Lets C code sum float32 numbers from now on, if the backend has such code; None: Python.

        The results keep their bits."""
        ...

    def close(self) -> None:
        """Releases the transport. Peers that still wait run into their deadline."""
        ...


class CollectiveTimeout(Exception):
    """A peer did not arrive in time.

    The message names the operation, this rank and, if known, the missing one.
    """


class PeerGaveUp(Exception):
    """Another rank has left the step that this one is in."""


class OutOfStep(Exception):
    """Another rank is in a different operation.

    One of the two has skipped an operation, and none of their results can be trusted.
    """


class CannotRejoin(Exception):
    """The other ranks cannot leave a step that one rank has left: the group must restart."""


class NoProgress:
    """A CollectiveProgress that does nothing."""

    address = None

    def begin(self, op: str, size_bytes: int) -> None:
        pass

    def end(self) -> None:
        pass

    def rejoined(self) -> None:
        pass
