"""Who may call which method: asked of every call before its message is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import grpc

from ryzanstein.auth.caller import Caller
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc import status

Metadata = Sequence[tuple[str, str | bytes]]
_CALLER: ContextVar[Caller] = ContextVar("caller")


class Guard(Protocol):
    """Lets calls in."""

    def admit(self, method: str, metadata: Metadata) -> Caller:
        """Returns who calls. Raises the error with which the call ends. It never waits."""
        ...


def caller() -> Caller:
    """Returns who sent the call that this task serves. Raises LookupError where no guard let it in."""
    return _CALLER.get()


def let_in(who: Caller) -> None:
    """Says who sent the call that this task serves."""
    _CALLER.set(who)


def refusing(error: RyzansteinError) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that ends a call of any kind with the error, and does not read its messages."""

    async def refuse(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await status.abort(context, error)
        yield b""

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
