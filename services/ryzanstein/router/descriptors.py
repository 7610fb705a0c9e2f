"""The limit of files and sockets that this process may have open."""

from __future__ import annotations

import contextlib
import resource

_OWN = 512  # links, gRPC channels, stores, logs


def may_open(num_connections: int) -> bool:
    """Raises the limit to fit the connections and the router's own descriptors.

    Returns False when the hard limit is too low.
    """
    wanted = num_connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return True
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft >= wanted
