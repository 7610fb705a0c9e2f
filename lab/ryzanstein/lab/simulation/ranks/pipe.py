"""The channel between an agent and a simulated rank, in memory: no socket, the same bytes.

The agent's channel, the frames and the codecs are real; the transport is simulated. What one side
sends reaches the other in a later turn of the loop, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context

import msgspec

from ryzanstein.worker.ranks.channel import AgentChannel, FrameSplitter, encode
from ryzanstein.worker.ranks.messages import AgentMessage, RankMessage, StartRank

_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


class RankPipe(asyncio.Transport):
    """The pipe of one rank, and the agent's transport.

    The rank sets `on_message` and `on_closed`, which are called in `context`. The agent's side is
    called in the context in which it opened its end.
    """

    def __init__(self, start: StartRank, context: Context) -> None:
        super().__init__()
        self.start = start
        self.fds = (start.board_fd,)
        self.on_message: Callable[[AgentMessage], None] = lambda message: None
        self.on_closed: Callable[[], None] = lambda: None
        self._context = self._agents_context = context
        self._loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter()
        self._channel: AgentChannel[RankMessage] | None = None
        self._closed = False

    async def connect(self, channel: AgentChannel[RankMessage]) -> None:
        """Opens the agent's end. If the rank has ended by then, the agent finds that out."""
        self._agents_context = copy_context()
        self._channel = channel
        channel.connection_made(self)
        if self._closed:
            self._loop.call_soon(self._lose, context=self._agents_context)

    def send(self, message: RankMessage) -> None:
        """Sends a message from the rank."""
        if self._channel is not None and not self._closed:
            self._loop.call_soon(self._deliver, encode(message), context=self._agents_context)

    def hang_up(self) -> None:
        """Closes the rank's end: the agent reads what was sent before, then the end."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._lose, context=self._agents_context)

    def cut(self) -> None:
        """Cuts the pipe, because the agent is gone. Nothing more is delivered."""
        self._closed, self._channel = True, None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Implements asyncio.Transport."""
        self._loop.call_soon(self._read, bytes(data), context=self._context)

    def abort(self) -> None:
        """Implements asyncio.Transport."""
        if not self._closed:
            self.hang_up()
            self._loop.call_soon(self.on_closed, context=self._context)

    def is_closing(self) -> bool:
        """Implements asyncio.Transport."""
        return self._closed

    def _read(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            if not self._closed:
                self.on_message(_decoder.decode(body))

    def _deliver(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.data_received(frame)

    def _lose(self) -> None:
        if self._channel is not None:
            self._channel.connection_lost(None)
