"""Prefix reuse: which blocks already hold the keys and values of a sequence's first tokens.

A block's contents depend on its tokens and on all tokens before it, so its key is a hash over its
own tokens and the key of its parent (a Merkle chain, as in vLLM's automatic prefix caching). Keys
are 128-bit BLAKE2b: a client that could build two prompts with the same key would read another
client's cache. The scheduler looks blocks up at admission and publishes them after each step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from ryzanstein.worker.engine.blocks import BlockPool
from ryzanstein.worker.engine.sequence import Sequence

KEY_BYTES = 16
_ROOT = b""


def chain_key(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Returns the key of a block with these tokens after the block with key `parent`.

    `parent` is empty for the first block.
    """
    return blake2b(array("q", token_ids).tobytes(), digest_size=KEY_BYTES, key=parent).digest()


class PrefixCache:
    """An index of the full blocks of sequences in a pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def match(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the longest cached prefix. Takes no reference.

        The last token is never part of it: it must be computed to get its logits.
        """
        num_full = (sequence.num_tokens - 1) // self._block_size
        self._extend_keys(sequence, num_full)
        return self._pool.find(sequence.keys[:num_full])

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that the last step filled findable."""
        num_full = sequence.num_computed // self._block_size
        self._extend_keys(sequence, num_full)
        for i in range(sequence.num_published, num_full):
            self._pool.publish(sequence.blocks[i], sequence.keys[i])
        sequence.num_published = num_full

    def _extend_keys(self, sequence: Sequence, num_full: int) -> None:
        keys = sequence.keys
        size = self._block_size
        while len(keys) < num_full:
            start = len(keys) * size
            keys.append(chain_key(keys[-1] if keys else _ROOT, sequence.tokens(start, start + size)))
