"""What a client wants of its generation when it goes away: the same two headers over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from enum import Enum

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import GenerationEvent
from ryzanstein.router.core.core import Core

CANCEL_ON_DISCONNECT = "x-cancel-on-disconnect"
RUN_DETACHED = "x-run-detached"


class OnDisconnect(Enum):
    """What becomes of a generation whose client has gone."""

    WAIT = "wait"
    """It waits for a reader for the grace, then it is paused."""
    CANCEL = "cancel"
    DETACH = "detach"
    """It runs to its end."""


def on_disconnect(headers: Mapping[str, str]) -> OnDisconnect:
    """From headers, or from metadata. INVALID_ARGUMENT for another value than true or false, and for a contradiction."""
    cancel, detach = _flag(headers, CANCEL_ON_DISCONNECT), _flag(headers, RUN_DETACHED)
    if cancel and detach:
        raise errors.invalid(RUN_DETACHED, f"contradicts {CANCEL_ON_DISCONNECT}", "true")
    if cancel:
        return OnDisconnect.CANCEL
    if detach or (cancel is False and detach is None):
        return OnDisconnect.DETACH
    return OnDisconnect.WAIT


def _flag(headers: Mapping[str, str], name: str) -> bool | None:
    """None: it was not given."""
    given = headers.get(name, "").strip().lower()
    if given not in ("", "true", "false"):
        raise errors.invalid(name, "must be true or false", given[:64])
    return None if not given else given == "true"


async def ending_with_reader(
    core: Core, generation_id: str, events: AsyncGenerator[GenerationEvent, None]
) -> AsyncGenerator[GenerationEvent, None]:
    """The events of a generation that a reader who goes before the end takes with it."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except (asyncio.CancelledError, GeneratorExit):
        await leave(core, generation_id)
        raise


async def leave(core: Core, generation_id: str) -> None:
    """Its client does not come back for it. It may have ended in the same moment."""
    with suppress(RyzansteinError):
        await core.leave(generation_id)
