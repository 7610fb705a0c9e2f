"""The events that the core sends to a recorder, so that generations outlive this router.

Without a journal they are ignored.
"""

from __future__ import annotations

from typing import Protocol

from ryzanstein.router.generations.generation import Generation


class Recorder(Protocol):
    """Receives events of generations. Only `flushed` and `close` wait, and never long."""

    def added(self, generation: Generation, new_messages: int) -> None:
        """Records a generation that is about to run, or was taken over.

        `new_messages` is how many of its last messages form its session's turn.
        """
        ...

    def ended(self, generation: Generation) -> None:
        """Records that the generation is settled."""
        ...

    def resumed(self, generation: Generation) -> None:
        """Records that a settled generation runs again."""
        ...

    def forgotten(self, generation: Generation) -> None:
        """Records that the generation can no longer be read."""
        ...

    async def flushed(self, generation: Generation) -> None:
        """Returns when all of it up to now is recorded, or cannot be recorded at present."""
        ...

    async def close(self) -> None: ...


class Unrecorded:
    """The recorder of a router that keeps its generations only in memory."""

    def added(self, generation: Generation, new_messages: int) -> None: ...

    def ended(self, generation: Generation) -> None: ...

    def resumed(self, generation: Generation) -> None: ...

    def forgotten(self, generation: Generation) -> None: ...

    async def flushed(self, generation: Generation) -> None: ...

    async def close(self) -> None: ...
