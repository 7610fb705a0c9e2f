"""The layout of the shared memory that `shm` collectives run over. Free of torch: the agent creates the segment.

The segment is one page of arrival counters and what each rank says it is in, a cache line apart so that ranks do not
disturb each other's spinning, then two slots for each rank. Ranks inherit it by file descriptor; a fresh one is all
zeros, which is the state before any collective.
"""

from __future__ import annotations

FLAGS_BYTES = 4096
FLAG_STRIDE_BYTES = 64
MAX_RANKS = FLAGS_BYTES // FLAG_STRIDE_BYTES
SLOT_BYTES = 1 << 20
SLOTS_PER_RANK = 2


def segment_bytes(num_ranks: int) -> int:
    """Size of the segment for so many ranks. Raises ValueError above MAX_RANKS."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"a segment has 1 to {MAX_RANKS} ranks, got {num_ranks}")
    return FLAGS_BYTES + num_ranks * SLOTS_PER_RANK * SLOT_BYTES


def slot_offset(rank: int, parity: int) -> int:
    """Where the rank's slot for even (0) or odd (1) operations begins."""
    return FLAGS_BYTES + (rank * SLOTS_PER_RANK + parity) * SLOT_BYTES
