"""How many bytes the router's files take at most."""

from __future__ import annotations

UNBOUNDED = 2**62
LOG_BYTES = 64 * 2**20
"""A write-ahead log and its index, of one router. It is copied into its file every 4 MB, but not within one write."""
OTHER_FILES_BYTES = 16 * 2**20
"""The view of the cluster, with one that is being written, and the table of changes."""
USAGE_BYTES = 32 * 2**20
"""The counts of a year, with what is known of the last generations."""
MOST_DAMAGED_BYTES = 64 * 2**20
"""A damaged journal that is larger is removed instead of set aside: its disk space is needed."""
