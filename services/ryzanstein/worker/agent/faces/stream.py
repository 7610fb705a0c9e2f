"""One router's stream as the node reads it: frames, and how long the router may be silent.

Reading goes on while a long prompt is tokenized: what the node has not handled yet waits in an inbox,
in order. So the node sees beats and the end of a stream at once, however much work the frames before
them cause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import Attempt
from ryzanstein.process.awake import AwakeTimer
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.wire.attempts import attempt_from_wire
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.routers import RouterLink

# More than a node can tokenize before its routers try another node.
MAX_BYTES = 32 * 2**20
_FRAME_BYTES = 256  # approximate overhead of a frame


class ReadAhead:
    """A queue bounded in bytes: when it is full, `put` waits. A single frame always fits."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._frames: asyncio.Queue[tuple[pb.ConnectRequest, int]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, frame: pb.ConnectRequest) -> None:
        await self._room.wait()
        size = frame.ByteSize() + _FRAME_BYTES
        self._count(size)
        self._frames.put_nowait((frame, size))

    async def get(self) -> pb.ConnectRequest:
        frame, size = await self._frames.get()
        self._count(-size)
        return frame

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes < self._max_bytes:
            self._room.set()
        else:
            self._room.clear()


_BEATS_MISSED = 4


class RouterSilence:
    """Ends a link whose router is silent for several of its beats.

    One timer looks now and then: a frame costs nothing but the time at which it came. Time in which this agent itself did not
    run does not count, nor that in which the router is not read.
    """

    def __init__(self, node: NodeAgent, link: RouterLink, beat_interval_s: float) -> None:
        self._awake, self._link, self._beat_interval_s = node.awake, link, beat_interval_s
        self._least_s = node.settings.tuning.router_silence_s
        self._heard_at = self._awake.now()
        self._timer = self._look_at(self._heard_at + self._allowed_s(quiet=False))

    def heard(self) -> None:
        self._heard_at = self._awake.now()

    def not_read(self) -> None:
        """Counts no silence until a frame is heard."""
        self._heard_at = math.inf

    def close(self) -> None:
        self._timer.cancel()

    def _look_at(self, when: float) -> AwakeTimer:
        return self._awake.call_at(when, self._look)

    def _look(self) -> None:
        now = self._awake.now()
        heard_at, allowed_s = min(self._heard_at, now), self._allowed_s(quiet=self._link.quiet)
        # A link that is quiet may not be so any more after the next frame.
        due = heard_at + self._allowed_s(quiet=False)
        if now >= due:
            due = heard_at + allowed_s
        if now < due:
            self._timer = self._look_at(due)
            return
        text = f"no message from router {self._link.router_id} for {allowed_s:g} s"
        self._link.close(errors.unavailable("ROUTER_SILENT", text))

    def _allowed_s(self, *, quiet: bool) -> float:
        beat_interval_s = max(self._beat_interval_s, self._link.quiet_s if quiet else 0.0)
        return max(self._least_s, _BEATS_MISSED * beat_interval_s)


class RouterStream:
    """The reading side of a link.

    `read` and `take_all` run as tasks until the link ends; then call `close`. Attempts for a model
    that sleeps, whose text is long, whose pages may be fetched, or whose constraint must be compiled,
    wait beside the stream, so that what follows them, above all their cancels, is handled meanwhile.
    """

    def __init__(self, node: NodeAgent, link: RouterLink) -> None:
        self._node, self._link = node, link
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._waiting_bytes = 0

    async def read(self, requests: AsyncIterator[pb.ConnectRequest], beat_interval_s: float | None, ahead: ReadAhead) -> None:
        """Reads the router's frames into `ahead`.

        Ends the link when the router ends its side, or is silent for several of its beats.
        """
        link = self._link
        silence = None if beat_interval_s is None else RouterSilence(self._node, link, beat_interval_s)
        with _ending(link):
            try:
                async for request in requests:
                    if link.closed:
                        return
                    if not request.HasField("beat"):
                        if request.HasField("submit"):
                            link.prepare(request.submit.handle)
                        if silence is not None:
                            silence.not_read()
                        await ahead.put(request)
                    elif request.beat.sequence:
                        link.acknowledge(request.beat.sequence)
                    if silence is not None:
                        silence.heard()
            finally:
                if silence is not None:
                    silence.close()
            link.close()

    async def take_all(self, ahead: ReadAhead) -> None:
        """Handles frames one after the other, so that a cancel is handled after its submit."""
        with _ending(self._link):
            while True:
                await self._take(await ahead.get())
                # Short prompts are tokenized in this loop: between two of them, beats,
                # acknowledgements and tokens are sent.
                await asyncio.sleep(0)

    async def _take(self, request: pb.ConnectRequest) -> None:
        match request.WhichOneof("frame"):
            case "submit":
                await self._submit(request.submit)
            case "cancel":
                self._cancel(request.cancel.handle)
            case frame:
                raise errors.invalid("frame", "must be submit, cancel or beat after the first hello", frame)

    async def _submit(self, submit: pb.Submit) -> None:
        if submit.handle in self._link.handles or submit.handle in self._waiting:
            raise errors.invalid("submit.handle", "must not be in use on this stream", submit.handle)
        try:
            attempt = attempt_from_wire(submit)
        except RyzansteinError as error:
            ids = {"request_id": submit.request_id, "generation_id": submit.generation_id}
            self._node.submissions.refuse(self._link, submit.handle, error, attempt=submit.attempt, **ids)
            return
        if not self._node.submissions.may_take_long(attempt):
            await self._node.submissions.submit(self._link, submit.handle, attempt)
        elif (refusal := self._no_room()) is None:
            self._wait(submit.handle, attempt, submit.ByteSize())
        else:
            ids = {"request_id": submit.request_id, "generation_id": submit.generation_id}
            self._node.submissions.refuse(self._link, submit.handle, refusal, attempt=submit.attempt, **ids)

    def _no_room(self) -> RyzansteinError | None:
        """Returns why no other attempt may wait beside the stream: at most as many may as the engine's queue holds."""
        settings = self._node.settings
        if len(self._waiting) >= (bound := settings.max_waiting + settings.max_sequences):
            return errors.queue_full(len(self._waiting), bound)
        if self._waiting_bytes >= MAX_BYTES:
            return errors.prompts_wait(self._waiting_bytes, MAX_BYTES)
        return None

    def _wait(self, handle: int, attempt: Attempt, size: int) -> None:
        task = self._node.background.once("waking_attempt", self._waited(handle, attempt))
        self._waiting[handle] = task
        self._waiting_bytes += size
        task.add_done_callback(lambda _: self._over(handle, size))

    async def _waited(self, handle: int, attempt: Attempt) -> None:
        with _ending(self._link):
            await self._node.submissions.submit(self._link, handle, attempt)

    def _over(self, handle: int, size: int) -> None:
        del self._waiting[handle]
        if handle not in self._link.handles:
            self._link.prepared(handle)
        self._waiting_bytes -= size

    def _cancel(self, handle: int) -> None:
        if (waiting := self._waiting.get(handle)) is not None:
            waiting.cancel()
        self._node.submissions.cancel(self._link, handle)

    def close(self) -> None:
        """Cancels the attempts that wait."""
        for waiting in self._waiting.values():
            waiting.cancel()


@contextmanager
def _ending(link: RouterLink) -> Iterator[None]:
    """Ends the link on an error: a violation of the protocol, or a bug."""
    try:
        yield
    except RyzansteinError as error:
        link.close(error)
    except Exception as error:
        link.close(errors.internal(f"{type(error).__name__} while reading the stream"))
        raise
