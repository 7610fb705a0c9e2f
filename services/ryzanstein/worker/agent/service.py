"""WorkerService: translates calls from the wire to the node, and results back to the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.cluster import NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import ChatPrompt, Prompt, TextPrompt
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceServicer
from ryzanstein.wire import attempt_from_wire, beat_to_wire, messages_from_wire, name_from_wire, timestamp
from ryzanstein.worker.agent.inbox import ReadAhead
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.operations import Operations
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.ranks.board import RankProgress
from ryzanstein.worker.ranks.group import RankLoss

Context = ServicerContext[Any, Any]

_BEATS_MISSED = 4


class WorkerServicer(WorkerServiceServicer):
    """A thin adapter from gRPC to the node and its operations."""

    def __init__(self, node: NodeAgent, operations: Operations) -> None:
        self._node = node
        self._operations = operations

    async def Connect(
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> AsyncIterator[pb.ConnectResponse]:
        requests = aiter(request_iterator)
        hello = await _hello(requests)
        link = self._node.connect(name_from_wire(hello.router_id, "router_id"))
        ahead = ReadAhead()
        reader = self._node.background.once("link_reader", self._read(link, requests, self._silence_s(hello), ahead))
        taker = self._node.background.once("link_taker", self._take_all(link, ahead))
        try:
            settings, beat = self._node.settings, beat_to_wire(self._node.beat())
            answer = pb.NodeHello(
                node_id=settings.node_id,
                incarnation=self._node.incarnation,
                beat=beat,
                beat_busy=_duration(settings.beat_busy_s),
                beat_idle=_duration(settings.beat_idle_s),
            )
            yield pb.ConnectResponse(hello=answer)
            async for frame in link.frames():
                yield frame
        finally:
            reader.cancel()
            taker.cancel()
            self._node.disconnect(link)

    def _silence_s(self, hello: pb.RouterHello) -> float | None:
        """Returns how long the router may be silent; None: it does not promise to send beats."""
        if not hello.HasField("beat_interval"):
            return None
        return max(self._node.settings.router_silence_s, _BEATS_MISSED * hello.beat_interval.ToNanoseconds() / 1e9)

    async def _read(
        self, link: RouterLink, requests: AsyncIterator[pb.ConnectRequest], silence_s: float | None, ahead: ReadAhead
    ) -> None:
        """Reads the router's frames.

        Ends the link when the router ends its side or is silent for too long.
        """
        with _ending(link):
            try:
                while (request := await self._within(silence_s, requests)) is not None:
                    if not request.HasField("beat"):
                        await ahead.put(request)
                    elif request.beat.sequence:
                        link.acknowledge(request.beat.sequence)
            except TimeoutError:
                text = f"no message from router {link.router_id} for {silence_s:g} s"
                raise errors.unavailable("ROUTER_SILENT", text) from None
            link.close()

    async def _within(self, silence_s: float | None, requests: AsyncIterator[pb.ConnectRequest]) -> pb.ConnectRequest | None:
        """Returns the next request; None after the last.

        Raises TimeoutError when none came in time; time in which this agent itself did not run does
        not count.
        """
        if silence_s is None:
            return await anext(requests, None)
        return await self._node.awake.within(silence_s, anext(requests, None))

    async def _take_all(self, link: RouterLink, ahead: ReadAhead) -> None:
        """Handles frames one after the other, so that a cancel is handled after its submit."""
        with _ending(link):
            while True:
                await self._take(link, await ahead.get())
                # Short prompts are tokenized in this loop: between two of them, beats,
                # acknowledgements and tokens are sent.
                await asyncio.sleep(0)

    async def _take(self, link: RouterLink, request: pb.ConnectRequest) -> None:
        match request.WhichOneof("frame"):
            case "submit":
                await self._submit(link, request.submit)
            case "cancel":
                self._node.running.cancel(link, request.cancel.handle)
            case frame:
                raise errors.invalid("frame", "must be submit, cancel or beat after the first hello", frame)

    async def _submit(self, link: RouterLink, submit: pb.Submit) -> None:
        if submit.handle in link.handles:
            raise errors.invalid("submit.handle", "must not be in use on this stream", submit.handle)
        try:
            attempt = attempt_from_wire(submit)
        except RyzansteinError as error:
            ids = {"request_id": submit.request_id, "generation_id": submit.generation_id}
            self._node.refuse(link, submit.handle, error, attempt=submit.attempt, **ids)
            return
        await self._node.submit(link, submit.handle, attempt)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        node, serving = self._node, self._node.host.serving
        ranks: list[pb.RankStatus] = []
        if serving is not None:
            resident = serving.group.resident_bytes()
            ranks = [_rank_status(progress, resident[progress.rank]) for progress in serving.group.progress()]
        return pb.GetStatusResponse(
            node_id=node.settings.node_id,
            incarnation=node.incarnation,
            beat=beat_to_wire(node.beat()),
            ranks=ranks,
            rank_restarts=node.host.losses,
            kv_blocks_held=node.stats.blocks_held,
            recent_losses=[_rank_loss(at, loss) for at, loss in node.host.recent_losses],
        )

    async def CountPromptTokens(self, request: pb.CountPromptTokensRequest, context: Context) -> pb.CountPromptTokensResponse:
        return pb.CountPromptTokensResponse(tokens=await self._node.count_tokens(request.model, _prompt(request)))

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        if not request.path:
            raise errors.invalid("path", "must be a directory")
        await self._operations.load(ModelChoice.at(request.path, name_from_wire(request.model, "model")))
        return pb.LoadModelResponse()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        await self._operations.unload(request.model)
        return pb.UnloadModelResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else self._node.settings.drain_grace_s
        return pb.DrainResponse(unfinished=await self._operations.drain(max(0.0, grace_s)))

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        self._operations.undrain()
        beat = self._node.beat()
        return pb.UndrainResponse(reason="" if beat.state is NodeState.READY else beat.reason)

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        return pb.ProfileResponse(chrome_trace=await self._operations.profile(request.rank, request.steps))


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


async def _hello(requests: AsyncIterator[pb.ConnectRequest]) -> pb.RouterHello:
    first = await anext(requests, None)
    if first is None or not first.HasField("hello"):
        raise errors.invalid("frame", "the first frame must be hello")
    return first.hello


def _prompt(request: pb.CountPromptTokensRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "messages":
            return ChatPrompt(messages_from_wire(request.messages.messages))
        case "text":
            return TextPrompt(request.text)
        case _:
            raise errors.invalid("prompt", "either messages or text is required")


def _rank_status(progress: RankProgress, resident_bytes: int) -> pb.RankStatus:
    return pb.RankStatus(
        rank=progress.rank,
        pid=progress.pid,
        step=progress.step,
        collective=progress.collective,
        phase=progress.phase,
        since_progress=_duration(progress.still_s),
        last_step=_duration(progress.last_step_s),
        resident_bytes=resident_bytes,
    )


def _rank_loss(at: float, loss: RankLoss) -> pb.RankLoss:
    return pb.RankLoss(time=timestamp(at), rank=loss.rank, cause=loss.cause.value, message=loss.message)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration
