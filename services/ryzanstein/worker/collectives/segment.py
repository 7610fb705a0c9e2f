"""The layout of the shared memory of `shm` collectives. Imports no torch: the agent creates it.

The segment starts with one page that holds each rank's arrival counter and current operation, a
cache line apart so that ranks do not disturb each other's spinning. Two slots for each rank follow.
Ranks inherit the segment by file descriptor. A new segment is all zeros, the state before any
collective.
"""

from __future__ import annotations

FLAGS_BYTES = 4096
FLAG_STRIDE_BYTES = 64
MAX_RANKS = FLAGS_BYTES // FLAG_STRIDE_BYTES
SLOT_BYTES = 1 << 20
SLOTS_PER_RANK = 2


def segment_bytes(num_ranks: int) -> int:
    """Returns the size of the segment for `num_ranks`. Raises ValueError above MAX_RANKS."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"a segment has 1 to {MAX_RANKS} ranks, got {num_ranks}")
    return FLAGS_BYTES + num_ranks * SLOTS_PER_RANK * SLOT_BYTES


def slot_offset(rank: int, parity: int) -> int:
    """Returns the offset of the rank's slot for even (0) or odd (1) operations."""
    return FLAGS_BYTES + (rank * SLOTS_PER_RANK + parity) * SLOT_BYTES
