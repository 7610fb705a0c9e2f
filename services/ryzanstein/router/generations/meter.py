"""What learns of a generation's tokens while it runs, to count and to bound them."""

from __future__ import annotations

import sys
from typing import Protocol


class Meter(Protocol):
    """Learns what a generation uses. `next_at`: the number of tokens in the log at which to call `grown`."""

    next_at: int

    def accepted(self, prompt_tokens: int) -> None:
        """Counts the prompt, once a node has accepted it."""
        ...

    def grown(self, num_tokens: int) -> bool:
        """Counts the tokens of a generation that goes on. Returns True if its answer must end here."""
        ...

    def settle(self, num_tokens: int) -> None:
        """Counts all tokens of a generation that runs no more, or not until it is resumed."""
        ...

    def resume(self) -> None:
        """Learns that a settled generation runs again."""
        ...

    def leave(self) -> None:
        """Learns that another router has the generation, and counts it."""
        ...


class Unmetered:
    """Counts nothing."""

    next_at = sys.maxsize

    def accepted(self, prompt_tokens: int) -> None: ...

    def grown(self, num_tokens: int) -> bool:
        return False

    def settle(self, num_tokens: int) -> None: ...

    def resume(self) -> None: ...

    def leave(self) -> None: ...


UNMETERED = Unmetered()
