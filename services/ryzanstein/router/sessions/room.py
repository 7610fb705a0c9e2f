"""How many bytes the sessions and kept responses of a store may take together.

Above that the least recently used ones are evicted, of either kind, but never a session that is
claimed: those of the tenant that takes more than half of the bound, else of everybody. Redis has a
bound of its own, `maxmemory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ryzanstein.generation.prompts import Message
from ryzanstein.router.storage.bounds import UNBOUNDED

LARGEST_SHARE = 4
"""One session or response may take a quarter of the bound, so that it fits when pages of a file are half empty."""
SESSION_BYTES = 1024
"""What a session takes besides its messages."""
MESSAGE_BYTES = 256
"""What a message takes besides its text, in memory and in a file, rather too much than too little."""


def _unheard(count: int) -> None:
    """Ignores a number."""


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """The bound, and who hears how many bytes are used and how many sessions or responses were evicted."""

    max_bytes: int = UNBOUNDED
    on_used: Callable[[int], object] = _unheard
    on_evicted: Callable[[int], object] = _unheard

    @property
    def share(self) -> int:
        """The bytes above which a tenant's own sessions are evicted first."""
        return self.max_bytes // 2


def bytes_of(messages: Sequence[Message]) -> int:
    """Returns what messages take: exact for plain ones in UTF-8, an upper bound for the others."""
    return sum(
        MESSAGE_BYTES + _text_bytes(message.content) + 4 * (message.num_chars - len(message.content)) for message in messages
    )


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
