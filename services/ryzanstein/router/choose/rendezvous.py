"""Rendezvous hashing: highest random weight (Thaler and Ravishankar, 1998).

Each node gets a pseudo-random weight from (key, node). The order of the weights is the order of the
candidates. When a node leaves, only its own keys move, each to its second choice; when a node
joins, it takes 1/N of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

_LOW_BITS = 20
_LOW = (1 << _LOW_BITS) - 1


def weight(key: bytes, node_id: str) -> int:
    """Returns a weight of 64 bits.

    The key is prefixed with its length, so that no (key, node) can be read as another.
    """
    digest = blake2b(len(key).to_bytes(4, "big") + key + node_id.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def weights(key: bytes, names: Iterable[bytes]) -> list[bytes]:
    """Returns the weights of encoded node ids, as bytes of the same order. Half the cost of `weight` for each."""
    begun = blake2b(len(key).to_bytes(4, "big") + key, digest_size=8)
    found = []
    for name in names:
        digest = begun.copy()
        digest.update(name)
        found.append(digest.digest())
    return found


def ranked(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """Returns the nodes in the key's order: the primary first, the backup second."""
    return sorted(node_ids, key=lambda node_id: (weight(key, node_id), node_id), reverse=True)


def scaled(random_weight: int, capacity: int) -> float:
    """Returns a weight for nodes of different capacities.

    A node's share of the keys is its share of the total capacity, and a change of one capacity
    moves only keys of that node (weighted rendezvous, the logarithmic method: Schindelhauer and
    Schomaker, 2005). Nodes of equal capacity keep the order of their plain weights.
    """
    # 52 bits: the largest value below 1 is then still a float below 1, and its logarithm is not 0.
    return -capacity / math.log(((random_weight >> 12) + 0.5) / 2**52)


def tie_breaker(random_weight: int) -> float:
    """Returns a number in [0, 1) from the low bits.

    It is independent of the order, which the high bits decide.
    """
    return (random_weight & _LOW) / (_LOW + 1)
