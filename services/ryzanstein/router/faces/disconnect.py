"""What happens to a generation when its client disconnects.

The client chooses with two headers, which are the same over every face.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from enum import Enum

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import GenerationEvent
from ryzanstein.router.core.core import Core

CANCEL_ON_DISCONNECT = "x-cancel-on-disconnect"
RUN_DETACHED = "x-run-detached"


class OnDisconnect(Enum):
    """What happens to a generation whose client has disconnected."""

    WAIT = "wait"
    """It waits for a reader for the grace period, then it is paused."""
    CANCEL = "cancel"
    DETACH = "detach"
    """It runs to its end."""


def on_disconnect(headers: Mapping[str, str]) -> OnDisconnect:
    """Returns the client's choice, from HTTP headers or gRPC metadata.

    Raises INVALID_ARGUMENT for a value other than true or false, and for contradicting headers.
    """
    cancel, detach = _flag(headers, CANCEL_ON_DISCONNECT), _flag(headers, RUN_DETACHED)
    if cancel and detach:
        raise errors.invalid(RUN_DETACHED, f"conflicts with {CANCEL_ON_DISCONNECT}", "true")
    if cancel:
        return OnDisconnect.CANCEL
    if detach or (cancel is False and detach is None):
        return OnDisconnect.DETACH
    return OnDisconnect.WAIT


@dataclass(frozen=True, slots=True)
class Departing:
    """A request, and what happens to its generation when its reader leaves before the end."""

    request: GenerationRequest
    cancels: bool
    """The generation is cancelled. Otherwise it waits for a reader, or runs on if it is detached."""

    @classmethod
    def of(cls, request: GenerationRequest, choice: OnDisconnect, *, can_return: bool) -> Departing:
        """Returns the rule for a request whose client chose so.

        A client that `can_return` reads a stream of one generation, at any position. Others can come
        back only with a key, or let it run detached.
        """
        detached = choice is OnDisconnect.DETACH
        ends = choice is OnDisconnect.CANCEL if can_return else not detached
        request = request if request.detached == detached else replace(request, detached=detached)
        return cls(request, ends and request.key is None)

    async def submit(self, core: Core) -> str:
        """Returns the id of the generation. Raises as `Core.submit` does."""
        return await core.submit(self.request, resumable=not self.cancels)

    async def left(self, core: Core, generation_id: str) -> None:
        """Cancels the generation if nobody comes back for it."""
        if self.cancels:
            await _cancel(core, generation_id)


def _flag(headers: Mapping[str, str], name: str) -> bool | None:
    """Returns the value of a header, or None when it is not given."""
    given = headers.get(name, "").strip().lower()
    if given not in ("", "true", "false"):
        raise errors.invalid(name, "must be true or false", given[:64])
    return None if not given else given == "true"


async def ending_with_reader(
    core: Core, generation_id: str, events: AsyncGenerator[GenerationEvent, None]
) -> AsyncGenerator[GenerationEvent, None]:
    """Yields a generation's events, and cancels the generation if its reader leaves before the end.

    A reader leaves by closing the iterator or by cancelling its task. See `Core.leave`.
    """
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except (asyncio.CancelledError, GeneratorExit):
        await _cancel(core, generation_id)
        raise


async def _cancel(core: Core, generation_id: str) -> None:
    """Cancels the generation of a client that does not come back. It may just have ended."""
    with suppress(RyzansteinError):
        await core.leave(generation_id)
