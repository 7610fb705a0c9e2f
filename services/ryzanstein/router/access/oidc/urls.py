"""Which addresses the keys of tokens may be fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_secure(url: str) -> bool:
    """Whether what a URL answers is what its owner sends: over TLS, or from this machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK))
