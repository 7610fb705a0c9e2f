"""The load generator: a set number of concurrent answers.

They share connections as those of many clients would.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ryzanstein import errors
from ryzanstein.lab.bench.router.load.answer_stream import AnswerStream
from ryzanstein.lab.bench.router.load.http2 import WINDOW_BYTES, Headers, Http2Connection, connect
from ryzanstein.lab.bench.router.scripted.script import Script

PATH = "/ryzanstein.v1.InferenceService/StreamChat"
_STREAMS_PER_CONNECTION = 32
_READY_S = 20.0


@dataclass(frozen=True, slots=True)
class Count:
    """Complete answers, tokens and messages."""

    answers: int
    tokens: int
    messages: int

    def since(self, before: Count) -> Count:
        return Count(self.answers - before.answers, self.tokens - before.tokens, self.messages - before.messages)


@dataclass(slots=True)
class StreamTally:
    """The sums over the answers of one load."""

    answers: int = 0
    tokens: int = 0
    messages: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, stream: AnswerStream) -> None:
        self.answers += 1
        self.tokens += stream.tokens
        self.messages += stream.messages
        self.delays_s += stream.delays_s
        if stream.first_token_at is not None:
            self.first_tokens_s.append(stream.first_token_at - stream.opened_at)
        if stream.problem:
            self.problems.append(stream.problem)


class StreamLoad:
    """Keeps as many answers running as were started, until `stop`; then it lets them end.

    Unless `again`, no other follows an answer.
    """

    def __init__(self, connections: list[Http2Connection], script: Script, *, again: bool = True) -> None:
        self.tally = StreamTally()
        self.running: set[AnswerStream] = set()
        self._connections = connections
        self._script = script
        self._message = script.request().SerializeToString()
        self.started = 0
        self._stopping = not again
        self._idle = asyncio.Event()

    def start(self, streams: int) -> None:
        """Starts this many more at once, spread over the connections."""
        self._idle.clear()
        for _ in range(streams):
            self._open(self._connections[self.started % len(self._connections)])
            self.started += 1

    def _open(self, connection: Http2Connection) -> None:
        def ended(stream: AnswerStream) -> None:
            self.running.discard(stream)
            self.tally.add(stream)
            if not self._stopping and not stream.problem:
                self._open(connection)
            elif not self.running:
                self._idle.set()

        stream = AnswerStream(self._script, ended)
        self.running.add(stream)
        connection.open(PATH, self._message, stream)

    def so_far(self) -> Count:
        """Returns what arrived so far, including unfinished answers."""
        running = self.running
        tokens, messages = sum(stream.tokens for stream in running), sum(stream.messages for stream in running)
        return Count(self.tally.answers, self.tally.tokens + tokens, self.tally.messages + messages)

    @property
    def begun(self) -> int:
        """Returns how many running answers have had their first token."""
        return sum(stream.tokens > 0 for stream in self.running)

    async def stop(self, timeout_s: float) -> StreamTally:
        """Starts no new answers and returns when the running ones ended.

        Those that do not end in time are problems.
        """
        self._stopping = True
        if self.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        self.tally.problems += [f"not ended: {stream.tokens} tokens after {timeout_s:g} s" for stream in self.running]
        return self.tally


@contextlib.asynccontextmanager
async def connections(
    port: int,
    number: int,
    window_bytes: int = WINDOW_BYTES,
    headers: Headers = (),
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[list[Http2Connection]]:
    """Opens connections, and closes them at the end."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [await connect(port, window_bytes, headers, tls) for _ in range(number)]
        for connection in opened:
            stack.callback(connection.transport.abort)
        yield opened


def connections_for(streams: int) -> int:
    return -(-streams // _STREAMS_PER_CONNECTION)


async def answer_once(connection: Http2Connection, script: Script) -> StreamTally:
    """Reads one answer from beginning to end."""
    load = StreamLoad([connection], script)
    load.start(1)
    return await load.stop(_READY_S)


async def ready(port: int, headers: Headers = (), tls: ssl.SSLContext | None = None) -> None:
    """Returns when a complete answer arrives. Raises UNAVAILABLE if none does in time."""
    deadline = time.monotonic() + _READY_S
    problem = "no answer"
    while time.monotonic() < deadline:
        async with connections(port, 1, headers=headers, tls=tls) as (connection,):
            tally = await answer_once(connection, Script(tokens=2))
        if not tally.problems:
            return
        problem = tally.problems[0]
        await asyncio.sleep(0.05)
    raise errors.unavailable("NOT_READY", f"no complete answer within {_READY_S:g} s: {problem}")
