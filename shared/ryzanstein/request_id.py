"""The id of a call in the logs of all services: the client's own, or a generated one; and what else is random in a request."""

from __future__ import annotations

import os
import re

MAX_CHARS = 128
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_CHARS}}}")

_BLOCK_BYTES = 4096


class RandomNumbers:
    """Random numbers of the system, as secret as those of `secrets`, read many at a time. Each byte is given once."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops what was read: a process that was forked must not give what its parent gives."""
        self._block, self._given = b"", 0

    def take(self, num_bytes: int) -> bytes:
        """Returns 1 to `_BLOCK_BYTES` bytes."""
        if len(self._block) - self._given < num_bytes:
            self._block, self._given = os.urandom(_BLOCK_BYTES), 0
        self._given += num_bytes
        return self._block[self._given - num_bytes : self._given]


_NUMBERS = RandomNumbers()
os.register_at_fork(after_in_child=_NUMBERS.forget)


def random_id() -> str:
    """Returns 32 hexadecimal digits that nobody can guess. To be called in the thread of the event loop."""
    return _NUMBERS.take(16).hex()


def random_seed() -> int:
    """Returns a number below 2^63. To be called in the thread of the event loop."""
    return int.from_bytes(_NUMBERS.take(8), "little") >> 1


def request_id(given: str) -> str:
    """Returns the client's id if it is 1 to 128 visible ASCII characters, otherwise a new one."""
    return given if _VISIBLE.fullmatch(given) else random_id()
