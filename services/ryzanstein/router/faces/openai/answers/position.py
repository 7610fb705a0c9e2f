"""Where the reader of an event stream is: the `id:` of each event, returned as `Last-Event-ID`.

It names the generation and the reader's position in it: `GENERATION:CHOICE:INDEX`, see `cursor` for
several choices. Ids of earlier versions have no generation: where the path names it, they still
say where to go on.
"""

from __future__ import annotations

import re

from ryzanstein import errors
from ryzanstein.router.faces.openai.answers.cursor import Cursor

LAST_EVENT_ID = "Last-Event-ID"
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,80}):(.*)", re.DOTALL)
_BARE = re.compile(r"[0-9]{1,2}:[0-9]+\.?(,.*)?", re.DOTALL)


def event_id(generation_id: str, cursor: Cursor) -> str:
    return f"{generation_id}:{cursor}"


def generation_of(last_event_id: str) -> str:
    """Returns the generation that an event's id names; empty for an id of an earlier version."""
    named = None if _BARE.fullmatch(last_event_id) else _NAMED.fullmatch(last_event_id)
    return named[1] if named else ""


def cursor_of(last_event_id: str, generation_id: str) -> Cursor:
    """Returns the position in this generation. An empty id is the beginning.

    Raises INVALID_ARGUMENT naming Last-Event-ID, also for the id of another generation's event.
    """
    named = generation_of(last_event_id)
    if named and named != generation_id:
        raise errors.invalid(LAST_EVENT_ID, f"must be of an event of generation {generation_id[:64]}", last_event_id[:64])
    return Cursor.parse(last_event_id.removeprefix(f"{named}:") if named else last_event_id)
