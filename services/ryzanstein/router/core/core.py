"""The core that all faces use: admit a request, run it exactly once, follow it from any index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from ryzanstein.embeddings import Embedded, EmbeddingRequest
from ryzanstein.generation.prompts import Prompt
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import GenerationEvent
from ryzanstein.router.nodes.calls.texts import Tokenized
from ryzanstein.router.nodes.table import ServedModel


class Core(Protocol):
    """The router's core as the faces see it. Every method may raise a `RyzansteinError`."""

    async def submit(self, request: GenerationRequest, *, resumable: bool = True) -> str:
        """Admits, journals and starts a generation, and returns its id.

        Without a reader the generation runs for a grace period (5 s) and is then paused. It is
        cancelled at the end of the re-attach window (30 s after the last reader left). A detached
        generation runs to its end.

        `resumable` False means that the client will not come back for the generation, so it need
        not outlive this router. With a key every generation is resumable.

        When another generation has the request's key, nothing is started: the id of that generation
        is returned, or FAILED_PRECONDITION is raised when its body differs.

        Cancelling the call while the generation is being admitted starts nothing. Cancelling it
        later cancels the generation, unless the request has a key or runs detached.
        """
        ...

    def follow(
        self,
        generation_id: str,
        from_index: Mapping[int, int] | None = None,
        owner_id: str = "",
        *,
        whole: bool = False,
        tenant: str = "",
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yields Started, then each choice's deltas from its index, then Finished per choice.

        The generation may be at any router. Raises the generation's error when it failed. Several
        readers may follow; a slow reader gets several tokens in one Delta. Closing the iterator
        detaches the reader. `owner_id` means that the caller is a router that addresses this router
        and no other. `whole` means that the client sees nothing before the end. `tenant` is the one
        that the caller names: another tenant's generation is NOT_FOUND. Without a name all are found.
        """
        ...

    async def cancel(self, generation_id: str, owner_id: str = "", *, tenant: str = "") -> None:
        """Cancels a generation, wherever it runs. Its choices finish as CANCELLED.

        Raises NOT_FOUND when the generation does not run. `owner_id` and `tenant` are as in `follow`.
        """
        ...

    async def leave(self, generation_id: str) -> None:
        """Cancels a generation whose client will not come back.

        Cancels it only if it runs at this router and has no other reader.
        """
        ...

    def models(self) -> list[ServedModel]: ...

    async def count_tokens(self, model: str, prompt: Prompt) -> int: ...

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool = True, with_texts: bool = False) -> Tokenized:
        """Returns a prompt's tokens.

        `special`: a text has the tokens that the tokenizer puts around it.
        """
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones by name."""
        ...

    async def embed(self, request: EmbeddingRequest) -> list[Embedded]:
        """Returns the vectors of the inputs, in their order.

        Cancelling the call ends the work on the nodes.
        """
        ...

    def model_of(self, name: str) -> str:
        """Returns the name of the model to use; `name` may be empty, or an adapter's. Raises NOT_FOUND and INVALID_ARGUMENT."""
        ...

    @property
    def ready(self) -> bool:
        """True when at least one ready node is linked."""
        ...
