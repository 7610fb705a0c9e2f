"""How many files and sockets this process may have open."""

from __future__ import annotations

import contextlib
import resource

_OWN = 512  # links, channels of gRPC, stores, logs


def may_open(num_connections: int) -> bool:
    """Asks for as many as the connections need beside our own. False: the hard limit is below that."""
    wanted = num_connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return True
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft >= wanted
