"""One `WorkerService.Connect` stream from hello to end: its reader, its writer, its cause of end.

Handles frames without interpreting them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import structlog

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.router.nodes.links.phi_detector import QUIET_INTERVAL_S
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

log = structlog.get_logger(__name__)

LINK_LOST = "link_lost"
PROTOCOL = "protocol"
NOT_TRUSTED = "not_trusted"
CONNECT_TIMEOUT_S = 5.0
MAX_WHY_CHARS = 512
# Most frames queued for a connection that accepts none. A normal delay does not queue so many.
MAX_UNSENT = 8192
# The longest interval between this router's beats. A node that misses several gives up the router,
# see `worker.agent.faces.service`.
BEAT_S = 1.0
# Used while attempts run. Waiting for the next beat takes up to this much of the time in which a
# deaf node is detected.
WORKING_BEAT_S = 0.15

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
    """An open stream. `serve` runs it; `send` and `end` may be called meanwhile."""

    def __init__(self, channel: grpc.aio.Channel, stub: Any, call: Any, hello: worker.NodeHello) -> None:
        self.channel = channel
        self.stub = stub
        self.hello = hello
        self._call = call
        self._unsent: deque[tuple[worker.ConnectRequest, _Written | None]] = deque()
        self._has_unsent: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._beats = 0
        self._last_beat = -math.inf

    def send(self, frame: worker.ConnectRequest, written: _Written | None = None) -> None:
        """Queues a frame. A full queue ends the stream.

        `written` receives the monotonic time at which gRPC has taken the frame.
        """
        if len(self._unsent) >= MAX_UNSENT:
            self.end(LINK_LOST)
            return
        self._unsent.append((frame, written))
        if self._has_unsent is not None:
            _wake(self._has_unsent)

    def end(self, cause: str) -> None:
        """Gives up the stream; `serve` returns the first cause."""
        if not self._ended.done():
            self._ended.set_result(cause)

    async def serve(self, receive: Callable[[worker.ConnectResponse], None], pulse: Pulse) -> str:
        """Passes every frame to `receive` until the stream ends, and returns the cause.

        A ValueError of `receive` ends the stream. Cancelling it stops reading and writing.
        """
        tasks = (asyncio.create_task(self._read(receive)), asyncio.create_task(self._write(pulse)))
        try:
            return await self._ended
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, receive: Callable[[worker.ConnectResponse], None]) -> None:
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if frame is None:  # gRPC returns None for bytes that are not a frame
                    log.warning("node sent a malformed frame")
                    self.end(PROTOCOL)
                    return
                receive(frame)
        except grpc.aio.AioRpcError as error:
            self.end(NOT_TRUSTED if error.code() is grpc.StatusCode.PERMISSION_DENIED else LINK_LOST)
        except Exception:
            log.exception("frame handling failed")
            self.end(PROTOCOL)
        self.end(LINK_LOST)

    async def _write(self, pulse: Pulse) -> None:
        try:
            await self._write_all(pulse)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader notices the end of the stream: a failed write only stops writing
        except Exception:
            log.exception("frame not written")
            self.end(PROTOCOL)

    async def _write_all(self, pulse: Pulse) -> None:
        while True:
            unsent = await self._next(self._last_beat + pulse.beat_interval_s)
            # Beat first, and not after a prompt whose write may take long.
            if time.monotonic() >= self._last_beat + pulse.beat_interval_s:
                await self._beat(pulse)
            if unsent is not None:
                frame, written = unsent
                await self._call.write(frame)
                if written is not None:
                    written(time.monotonic())

    async def _next(self, until: float) -> tuple[worker.ConnectRequest, _Written | None] | None:
        """Returns the next frame; None when there is none until the given time."""
        if not self._unsent:
            loop = asyncio.get_running_loop()
            self._has_unsent = waiting = loop.create_future()
            timer = loop.call_later(max(0.0, until - time.monotonic()), _wake, waiting)
            try:
                await waiting
            finally:
                timer.cancel()
                self._has_unsent = None
        return self._unsent.popleft() if self._unsent else None

    async def _beat(self, pulse: Pulse) -> None:
        self._beats += 1
        self._last_beat = time.monotonic()
        pulse.beaten(self._beats)
        await self._call.write(worker.ConnectRequest(beat=worker.RouterBeat(sequence=self._beats)))


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
    channel = dialer.open(address, expect, retries=False)
    call = None
    try:
        stub: Any = WorkerServiceStub(channel)
        call = stub.Connect()
        hello = await _exchange_hellos(call, router_id, model)
        if dialer.secure and hello.node_id.partition("/")[0] != expect.name:
            raise NotConnectedError(f"{expect} says that it is {hello.node_id}")
        yield Connection(channel, stub, call, hello)
    finally:
        if call is not None:
            call.cancel()
        await channel.close()


async def _name_of(address: str, dialer: Dialer) -> str:
    """Returns the id that a node at this address says it has. Raises NotConnectedError."""
    async with dialer.open(address, Peer(PeerRole.NODE), retries=False) as channel:
        try:
            answer = await WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
    if not answer.node_id:
        raise NotConnectedError("it does not say which node it is")
    return str(answer.node_id)


def _failed(error: grpc.aio.AioRpcError) -> NotConnectedError:
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        log.warning("node refuses this router", why=error.details())
    return NotConnectedError(f"{error.code().name}: {error.details()}"[:MAX_WHY_CHARS])


async def _exchange_hellos(call: Any, router_id: str, model: str) -> worker.NodeHello:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            router_hello = worker.RouterHello(router_id=router_id, model=model)
            router_hello.beat_interval.FromNanoseconds(round(BEAT_S * 1e9))
            router_hello.quiet_interval.FromNanoseconds(round(QUIET_INTERVAL_S * 1e9))
            await call.write(worker.ConnectRequest(hello=router_hello))
            frame = await call.read()
    except grpc.aio.AioRpcError as error:
        raise _failed(error) from None
    except TimeoutError:
        raise NotConnectedError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except asyncio.InvalidStateError:
        raise NotConnectedError("the call ended before its first message was written") from None
    if frame is grpc.aio.EOF or frame is None or not frame.HasField("hello"):
        raise NotConnectedError("it ended the stream without a hello")
    if frame.hello.model != model:
        raise NotConnectedError(f"it does not serve the model {model}")
    hello: worker.NodeHello = frame.hello
    return hello


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
