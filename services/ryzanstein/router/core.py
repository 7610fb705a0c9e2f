"""What both faces stand on: admit a request, run it exactly once, follow it from any index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.generation import GenerationEvent, GenerationRequest, Prompt


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one ready node serves; `context_length` in tokens."""

    name: str
    context_length: int
    ready_nodes: int


class Core(Protocol):
    """The router's core as the faces see it. Every method may raise a `RyzansteinError`."""

    async def submit(self, request: GenerationRequest) -> str:
        """Admits, journals and starts a generation; returns its generation id. It goes on without a reader for the
        re-attach window (30 s after the last reader left), then it is cancelled."""
        ...

    def follow(self, generation_id: str, from_index: Mapping[int, int] | None = None) -> AsyncGenerator[GenerationEvent, None]:
        """Started, then each choice's deltas from its index on, then Finished per choice. Raises the generation's error
        when it failed. Many readers may follow; a slow one gets several tokens in one Delta. Closing the iterator detaches
        the reader."""
        ...

    async def cancel(self, generation_id: str) -> None:
        """The choices finish as CANCELLED. NOT_FOUND when it does not run."""
        ...

    def models(self) -> list[ServedModel]: ...

    async def count_tokens(self, model: str, prompt: Prompt) -> int: ...

    @property
    def ready(self) -> bool:
        """At least one ready node is linked."""
        ...
