"""One `WorkerService.Connect` stream from hello to end: its frames, this router's beats, its cause of end.

Handles frames without interpreting them. A frame is passed on while it is read, and one that is sent goes
to the connection at once: there is no task between.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol
from zlib import crc32

import grpc
import structlog
from google.protobuf.message import DecodeError

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.router.nodes.links.phi_detector import QUIET_INTERVAL_S
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.http2.call_end import CallEnd, CallFailedError
from ryzanstein.rpc.http2.client_stream import ClientStream
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

log = structlog.get_logger(__name__)

LINK_LOST = "link_lost"
PROTOCOL = "protocol"
NOT_TRUSTED = "not_trusted"
CONNECT_TIMEOUT_S = 5.0
# Most frames queued for a connection that accepts none. A normal delay does not queue so many.
MAX_UNSENT = 8192
# The longest interval between this router's beats. A node that misses several gives up the router,
# see `worker.agent.faces.service`.
BEAT_S = 1.0
# Used while attempts run. Waiting for the next beat takes up to this much of the time in which a
# deaf node is detected.
WORKING_BEAT_S = 0.15
# Quiet links share the moments of their beats. A router with a thousand quiet links wakes 16 times in two seconds
# to beat on all of them, and the answers of their nodes come together, too.
MOMENT_S = 0.125

_METHOD = "/ryzanstein.v1.WorkerService/Connect"
_LEAST_DELAY_S = 0.001  # of the loop's timers

_Written = Callable[[float], None]


class Pulse(Protocol):
    """The interval of this router's beats on a stream, and the observer of each beat."""

    @property
    def beat_interval_s(self) -> float:
        """The interval: at most BEAT_S, which was announced to the node, or QUIET_INTERVAL_S while the node beats as seldom."""
        ...

    def beaten(self, sequence: int) -> None:
        """Called when a beat is handed to the connection. Must neither block nor raise."""
        ...


class Connection:
    """A stream: `open` it, let `serve` run it, and `close` it. `send` and `end` may be called meanwhile."""

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        """`open_channel` is called for the first call beside the stream."""
        self.hello = worker.NodeHello()
        self._open_channel = open_channel
        self._channel: grpc.aio.Channel | None = None
        self._stream: ClientStream | None = None
        self._receive: Callable[[worker.ConnectResponse], None] | None = None
        self._pulse: Pulse | None = None
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[worker.ConnectResponse | CallEnd] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._early: list[worker.ConnectResponse] = []
        self._unsent: deque[tuple[worker.ConnectRequest, _Written | None]] = deque()
        self._half_sent: _Written | None = None
        self._beats = 0
        self._last_beat = -math.inf
        self._place = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for calls beside the stream. It has a connection of its own, and ends with the stream."""
        if self._channel is None:
            self._channel = self._open_channel()
        return self._channel

    async def open(self, address: str, expect: Peer, dialer: Dialer, hello: worker.RouterHello) -> None:
        """Exchanges hellos. Raises NotConnectedError."""
        self._place = crc32(f"{hello.model} {address}".encode())
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._stream = await dialer.open_stream(address, expect, _METHOD, self)
                if self._stream.ready:  # else it has ended by now, and says why
                    self._stream.send(worker.ConnectRequest(hello=hello).SerializeToString())
                frame = await self._first
        except CallFailedError as failure:
            raise _failed(failure.end) from None
        except TimeoutError:
            raise NotConnectedError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
        if isinstance(frame, CallEnd):
            raise _failed(frame)
        if not frame.HasField("hello"):
            raise NotConnectedError("it ended the stream without a hello")
        self.hello = frame.hello

    async def close(self) -> None:
        """Ends the stream and the calls beside it."""
        self.end(LINK_LOST)
        if self._stream is not None:
            self._stream.close()
        if self._channel is not None:
            await self._channel.close()

    def send(self, frame: worker.ConnectRequest, written: _Written | None = None) -> None:
        """Sends a frame, or queues it while the connection takes none. A full queue ends the stream.

        `written` receives the monotonic time at which the connection has taken the frame.
        """
        if len(self._unsent) >= MAX_UNSENT:
            self.end(LINK_LOST)
            return
        self._unsent.append((frame, written))
        self._send_all()

    def end(self, cause: str) -> None:
        """Gives up the stream; `serve` returns the first cause."""
        if not self._ended.done():
            self._ended.set_result(cause)

    async def serve(self, receive: Callable[[worker.ConnectResponse], None], pulse: Pulse) -> str:
        """Passes every frame to `receive` until the stream ends, and returns the cause.

        An exception of `receive` ends the stream. Cancelling it stops reading and writing.
        """
        self._receive, self._pulse = receive, pulse
        for frame in self._early:
            self._pass_on(frame)
        self._send_all()
        try:
            return await self._ended
        finally:
            self.end(LINK_LOST)
            self._disarm()

    # What the stream receives.

    def message(self, data: bytes) -> None:
        """Implements `MessageReceiver`."""
        if self._ended.done():
            return
        try:
            frame = worker.ConnectResponse.FromString(data)
        except DecodeError:
            log.warning("node sent a malformed frame")
            self._finish(CallEnd(grpc.StatusCode.INTERNAL, "it sent a malformed frame"), PROTOCOL)
            return
        if self._receive is not None:
            self._pass_on(frame)
        elif not self._first.done():
            self._first.set_result(frame)
        else:
            self._early.append(frame)

    def writable(self) -> None:
        """Implements `MessageReceiver`."""
        written, self._half_sent = self._half_sent, None
        if written is not None:
            written(time.monotonic())
        self._send_all()

    def ended(self, end: CallEnd) -> None:
        """Implements `MessageReceiver`."""
        self._finish(end, NOT_TRUSTED if end.code is grpc.StatusCode.PERMISSION_DENIED else LINK_LOST)

    def _finish(self, end: CallEnd, cause: str) -> None:
        if not self._first.done():
            self._first.set_result(end)
        self.end(cause)

    def _pass_on(self, frame: worker.ConnectResponse) -> None:
        if self._receive is None or self._ended.done():
            return
        try:
            self._receive(frame)
        except Exception:
            log.exception("frame handling failed")
            self.end(PROTOCOL)

    # What this router sends.

    def _send_all(self) -> None:
        """Sends what the connection takes: a beat that is due first, and not after a prompt that takes long to write."""
        stream = self._stream
        if stream is None or self._ended.done():
            return
        try:
            while stream.ready and (self._beat_if_due(stream) or self._send_next(stream)):
                pass
        except Exception:
            log.exception("frame not written")
            self.end(PROTOCOL)
            return
        self._arm(stream)

    def _send_next(self, stream: ClientStream) -> bool:
        """Sends the next frame. Returns False if there is none."""
        if not self._unsent:
            return False
        frame, written = self._unsent.popleft()
        stream.send(frame.SerializeToString())
        if stream.holds:
            self._half_sent = written
        elif written is not None:
            written(time.monotonic())
        return True

    def _beat_if_due(self, stream: ClientStream) -> bool:
        now = time.monotonic()
        if self._pulse is None or now < self._next_beat(self._pulse.beat_interval_s):
            return False
        self._beats += 1
        self._last_beat = now
        self._pulse.beaten(self._beats)
        stream.send(worker.ConnectRequest(beat=worker.RouterBeat(sequence=self._beats)).SerializeToString())
        return True

    def _next_beat(self, interval_s: float) -> float:
        shares = interval_s > BEAT_S and self._beats > 0
        return next_moment(self._last_beat, interval_s, self._place) if shares else self._last_beat + interval_s

    def _arm(self, stream: ClientStream) -> None:
        """Sets the timer to the next beat. A connection that takes nothing says when it does again."""
        if self._pulse is None or not stream.ready:
            return
        due = self._next_beat(self._pulse.beat_interval_s)
        if self._timer is None or due < self._timer_at:
            self._disarm()
            delay_s = max(_LEAST_DELAY_S, due - time.monotonic())
            self._timer, self._timer_at = asyncio.get_running_loop().call_later(delay_s, self._on_timer), due

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._send_all()


def next_moment(last: float, interval_s: float, place: int) -> float:
    """Returns the first of a quiet link's moments after `last`. They are `interval_s` apart; `place` selects their offset."""
    moment_s = place * MOMENT_S % interval_s
    return math.ceil((last + MOMENT_S / 2 - moment_s) / interval_s) * interval_s + moment_s


class NotConnectedError(Exception):
    """There is no stream to a node. The message says why, for people."""


@contextlib.asynccontextmanager
async def connect(address: str, router_id: str, model: str, dialer: Dialer = PLAIN) -> AsyncIterator[Connection]:
    """Yields a stream after the exchange of hellos.

    `model`: one of the node's further models, or empty for its first. Raises NotConnectedError when the
    call fails, the node does not answer within five seconds, is not the one that it says, or does not
    know of further models.
    """
    expect = Peer(PeerRole.NODE)
    if dialer.secure:
        # A client does not see a server's certificate, but it can demand one: the node says who it
        # is, and has to prove it.
        expect = Peer(PeerRole.NODE, await _name_of(address, dialer))
        if not dialer.trusts(expect):
            raise NotConnectedError(f"{expect} is denied")
    connection = Connection(lambda: dialer.open(address, expect, retries=False))
    try:
        await connection.open(address, expect, dialer, _router_hello(router_id, model))
        if connection.hello.model != model:
            raise NotConnectedError(f"it does not serve the model {model}")
        if dialer.secure and connection.hello.node_id.partition("/")[0] != expect.name:
            raise NotConnectedError(f"{expect} says that it is {connection.hello.node_id}")
        yield connection
    finally:
        await connection.close()


def _router_hello(router_id: str, model: str) -> worker.RouterHello:
    hello = worker.RouterHello(router_id=router_id, model=model)
    hello.beat_interval.FromNanoseconds(round(BEAT_S * 1e9))
    hello.quiet_interval.FromNanoseconds(round(QUIET_INTERVAL_S * 1e9))
    return hello


async def _name_of(address: str, dialer: Dialer) -> str:
    """Returns the id that a node at this address says it has. Raises NotConnectedError."""
    async with dialer.open(address, Peer(PeerRole.NODE), retries=False) as channel:
        try:
            answer = await WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failed(CallEnd(error.code(), error.details() or "")) from None
    if not answer.node_id:
        raise NotConnectedError("it does not say which node it is")
    return str(answer.node_id)


def _failed(end: CallEnd) -> NotConnectedError:
    if end.code is grpc.StatusCode.PERMISSION_DENIED:
        log.warning("node refuses this router", why=end.details)
    return NotConnectedError(str(end))
