"""The address of a Redis server.

The URL may contain a password, so it is never logged; `address` is the part that may be shown.
"""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

from ryzanstein.addresses import join_address

_SCHEMES = ("redis", "rediss", "unix")


def checked_redis_url(url: str) -> str:
    """Returns the URL. Raises ValueError, without the URL in it, when it is not valid."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not (parts.hostname or parts.path):
        raise ValueError("must be redis://, rediss:// or unix://, then [user:password@]host[:port][/database]")
    with contextlib.suppress(ValueError):
        if parts.port != 0:
            return url
    raise ValueError("must name a port in [1, 65535]")


def address(url: str) -> str:
    """Returns the URL without user, password and options."""
    parts = urlsplit(url)
    place = parts.path if parts.scheme == "unix" else join_address(parts.hostname or "", parts.port or 6379) + parts.path
    return f"{parts.scheme}://{place}"
