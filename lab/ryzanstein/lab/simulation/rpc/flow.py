"""What both ends of a simulated call use: messages that were not read yet, and flow control."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from ryzanstein.lab.simulation.machine.loop import OWNER
from ryzanstein.lab.simulation.machine.process import Process

WINDOW_BYTES = 4 * 2**20
EOF = object()

Metadata = tuple[tuple[str, str | bytes], ...]


class ClientEnd(Protocol):
    """The client's end of a call, as its server sees it."""

    def begun(self, metadata: Metadata) -> None: ...

    def receive(self, data: bytes) -> None: ...

    def written(self, size: int) -> None:
        """The server has read so many bytes."""
        ...

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None: ...


def process() -> Process:
    """Returns the process whose code runs."""
    owner = OWNER.get()
    assert isinstance(owner, Process), "a call from outside of a simulated process"
    return owner


def rewritten(sender: Process, message: Any) -> Any:
    """Returns the message as a service of the sender's version would send it."""
    return sender.rewrite(message) if sender.rewrite is not None else message


class SimulatedStream:
    """Messages that arrived on one side of a call and were not read yet."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.unread_bytes = 0
        self.on_read: Callable[[], None] = lambda: None

    def push(self, message: Any, size: int = 0) -> None:
        self._messages.append((message, size))
        self.unread_bytes += size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pop(self) -> Any:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message, size = self._messages.popleft()
        if message is EOF:
            self._messages.append((message, 0))  # for further reads
        self.unread_bytes -= size
        if size:
            self.on_read()
        return message


class Window:
    """Limits how many bytes may be unread by a reader."""

    def __init__(self) -> None:
        self._unread = 0
        self._room: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        return self._unread >= WINDOW_BYTES

    async def wait(self) -> None:
        while self._unread >= WINDOW_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def sent(self, size: int) -> None:
        self._unread += size

    def read(self, size: int) -> None:
        self._unread -= size
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
