"""A page on its way: content under a key, with a checksum that binds both to what they are good for.

A *root* names the weights, the format of the KV cache and the cache scope. A page is good only where the
root is the same, and its checksum covers root, key and content. That finds damage and mix-ups. It
does not find malice: whoever can reach a node's port can compute a checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

ROOT_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The sizes of pages with the heads of all ranks, by their keys.

    Where blocks are compressed, the hot pages are a group of their own, `hot_group`, and have
    `hot_bytes` each; 0: there are none.
    """

    block_bytes: int
    hot_bytes: int = 0
    hot_group: int = 0

    def of(self, key: bytes) -> int:
        """Returns the size of the page with this key."""
        return self.hot_bytes if self.hot_bytes and key[-1] == self.hot_group else self.block_bytes

    @property
    def largest(self) -> int:
        return max(self.block_bytes, self.hot_bytes)

    def fit(self, keys: Iterable[bytes], num_bytes: int) -> int:
        """Returns how many of the first of these pages are in so many bytes, at least one if there are any."""
        num = 0
        for key in keys:
            num_bytes -= self.of(key)
            if num and num_bytes < 0:
                break
            num += 1
        return num


@dataclass(frozen=True, slots=True)
class Page:
    """One page of one group of layers of a prefix cache, with the heads of all ranks.

    `key` is its name in the engine, see `engine.travel`.
    """

    key: bytes
    content: bytes | memoryview

    def checksum(self, root: bytes) -> int:
        """Returns the checksum of the page under a root (CRC-32: 3 GB a second here, BLAKE2b 0.6)."""
        return zlib.crc32(self.content, zlib.crc32(root + self.key))


def root_of(weights: bytes, page_format: str, scope: str) -> bytes:
    """Returns the root of a cache scope's pages of a model."""
    digest = blake2b(digest_size=ROOT_BYTES, person=b"ryzanstein-pages")
    for part in (weights, page_format.encode(), scope.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
