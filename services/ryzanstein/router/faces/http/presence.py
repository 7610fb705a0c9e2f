"""Notices that a client went away while it is being served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientLeft(Exception):
    """The client closed its connection; nobody will read the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. ClientLeft when the client goes first: the work is cancelled and has ended by then.

    The request's body must have been read: what `receive` gives afterwards is the end of the connection.
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
