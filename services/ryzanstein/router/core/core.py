"""What both faces stand on: admit a request, run it exactly once, follow it from any index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from ryzanstein.generation import GenerationEvent, GenerationRequest, Prompt
from ryzanstein.router.nodes.served import ServedModel


class Core(Protocol):
    """The router's core as the faces see it. Every method may raise a `RyzansteinError`."""

    async def submit(self, request: GenerationRequest, *, resumable: bool = True) -> str:
        """Admits, journals and starts a generation; returns its generation id. Without a reader it runs on for a grace (5 s),
        is then paused, and cancelled at the end of the re-attach window (30 s after the last reader left); a detached one runs
        to its end. `resumable` False: its client will not come back for it, so it need not outlive this router. A request whose
        key another generation has is not started: that one's id is returned, FAILED_PRECONDITION when it has another body; with
        a key every generation is resumable."""
        ...

    def follow(
        self, generation_id: str, from_index: Mapping[int, int] | None = None, owner_id: str = "", *, whole: bool = False
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Started, then each choice's deltas from its index on, then Finished per choice, from wherever the generation is.
        Raises the generation's error when it failed. Many readers may follow; a slow one gets several tokens in one Delta.
        Closing the iterator detaches the reader. `owner_id`: the caller is a router that means this one and no other. `whole`:
        nothing is shown to the client before the end."""
        ...

    async def cancel(self, generation_id: str, owner_id: str = "") -> None:
        """Wherever it runs; `owner_id` as in `follow`. The choices finish as CANCELLED. NOT_FOUND when it does not run."""
        ...

    async def leave(self, generation_id: str) -> None:
        """Its client will not come back: it is cancelled if it runs at this router and nobody else reads it."""
        ...

    def models(self) -> list[ServedModel]: ...

    async def count_tokens(self, model: str, prompt: Prompt) -> int: ...

    @property
    def ready(self) -> bool:
        """At least one ready node is linked."""
        ...
