"""Where a reader that comes back has to begin."""

from __future__ import annotations

from contextlib import aclosing

from ryzanstein.generation.events import Delta
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import read_start
from ryzanstein.router.faces.openai.answers.cursor import Cursor


async def first_wanted(core: Core, generation_id: str, cursor: Cursor, tenant: str = "") -> dict[int, int]:
    """Returns the index of the first token wanted of each choice.

    Log probabilities are aligned with the text from its beginning, and calls are read from there.
    Such a stream therefore also reads the tokens that the reader has seen, for its `Pieces` alone.
    """
    seen = cursor.from_index
    if not any(seen.values()):
        return seen
    async with aclosing(core.follow(generation_id, seen, tenant=tenant)) as events:
        started = await read_start(events)  # checks the position
    if started.reply is not None:
        return {}
    async with aclosing(core.follow(generation_id, {}, tenant=tenant)) as events:
        async for event in events:
            if isinstance(event, Delta):
                return {} if event.tokens[0].logprobs is not None else seen
    return seen
