"""The limit of descriptors, for benchmarks with thousands of connections."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Raises the limit of this process and of those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
