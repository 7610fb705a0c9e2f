"""Detects that a client disconnects while it is being served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientLeft(Exception):
    """The client closed its connection, so the answer has no reader."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`. Raises ClientLeft when the client disconnects first.

    The work has then been cancelled and has ended. Cancelling this coroutine also cancels the work.

    The request's body must have been read: what `receive` returns afterwards is the end of the
    connection.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
