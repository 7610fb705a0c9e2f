"""What the connection says of its client: whether it is still there, and whether it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope

_T = TypeVar("_T")


_FLOW = "ryzanstein.flow"


class Flow(Protocol):
    """What is sent on a connection; see uvicorn's FlowControl."""

    write_paused: bool


def tell_flow(scope: Scope, flow: Flow) -> None:
    """Lets the application see the flow of the connection of a request."""
    scope[_FLOW] = flow


def write_may_wait(scope: Scope) -> bool:
    """Returns whether what is sent now may wait for the client to read. Unknown counts as yes."""
    flow: Flow | None = scope.get(_FLOW)
    return flow is None or flow.write_paused


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
