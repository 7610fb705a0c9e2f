"""Rendezvous hashing: highest random weight (Thaler and Ravishankar, 1998).

Each node gets a pseudo-random weight from (key, node); the order of weights is the order of candidates. When a node leaves,
only its own keys move, each to its second choice; when one joins, it takes 1/N of the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def weight(key: bytes, node_id: str) -> int:
    """64 bits. The key's length stands in front, so that no (key, node) can be read as another."""
    digest = blake2b(digest_size=8)
    digest.update(len(key).to_bytes(4, "big"))
    digest.update(key)
    digest.update(node_id.encode())
    return int.from_bytes(digest.digest(), "big")


def ranked(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the key's order: first the primary, second the backup."""
    return sorted(node_ids, key=lambda node_id: (weight(key, node_id), node_id), reverse=True)
