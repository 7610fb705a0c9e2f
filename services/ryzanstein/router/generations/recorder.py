"""What the core tells a recorder of its generations, so that they outlive this router. Without a journal nobody listens."""

from __future__ import annotations

from typing import Protocol

from ryzanstein.router.generations.generation import Generation


class Recorder(Protocol):
    """Hears of generations. Only `flushed` and `close` wait, and never long."""

    def added(self, generation: Generation, new_messages: int) -> None:
        """It is about to run, or was taken over. `new_messages`: how many of its last messages make its session's turn."""
        ...

    def ended(self, generation: Generation) -> None:
        """It is settled."""
        ...

    def resumed(self, generation: Generation) -> None:
        """One that was settled runs again."""
        ...

    def forgotten(self, generation: Generation) -> None:
        """It can no longer be read."""
        ...

    async def flushed(self, generation: Generation) -> None:
        """Everything of it up to now is on record, or cannot be put on record for the time being."""
        ...

    async def close(self) -> None: ...


class Unrecorded:
    """The recorder of a router that keeps its generations in memory alone."""

    def added(self, generation: Generation, new_messages: int) -> None: ...

    def ended(self, generation: Generation) -> None: ...

    def resumed(self, generation: Generation) -> None: ...

    def forgotten(self, generation: Generation) -> None: ...

    async def flushed(self, generation: Generation) -> None: ...

    async def close(self) -> None: ...
