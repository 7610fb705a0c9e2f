"""WorkerService: translates calls from the wire to the node, and results back to the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.auth.audit.audit_record import Facts
from ryzanstein.auth.audit.auditor import Auditor
from ryzanstein.auth.peers.peer import check_name
from ryzanstein.cluster import NodeState
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt
from ryzanstein.generation.request import ADAPTERS, CACHE_SCOPES, CONSTRAINTS, EXTENDED, PROMPT_CUTS, TOOLS
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceServicer
from ryzanstein.wire.adapters import report_to_wire
from ryzanstein.wire.membership import beat_to_wire
from ryzanstein.wire.requests import conversation_from_wire, messages_from_wire, name_from_wire
from ryzanstein.wire.timestamps import duration
from ryzanstein.worker.agent.faces.debug import loss_to_wire, rank_to_wire
from ryzanstein.worker.agent.faces.figures import figures_to_wire
from ryzanstein.worker.agent.faces.stream import ReadAhead, RouterStream
from ryzanstein.worker.agent.model_host import ModelChoice, ModelHost
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.node import NodeAgent

Context = ServicerContext[Any, Any]
_PART_BYTES = 256 * 1024


class WorkerServicer(WorkerServiceServicer):
    """A thin adapter from gRPC to the node's agents and their operations. `protection` says how the node is protected now."""

    def __init__(self, models: NodeModels, auditor: Auditor, protection: Callable[[], pb.Protection]) -> None:
        self._models, self._auditor, self._protection = models, auditor, protection

    async def Connect(
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> AsyncIterator[pb.ConnectResponse]:
        requests = aiter(request_iterator)
        hello = await _hello(requests)
        check_name(hello.router_id)
        node = self._models.linked(hello.model).node
        link = node.links.open(name_from_wire(hello.router_id, "router_id"), hello.quiet_interval.ToNanoseconds() / 1e9)
        stream = RouterStream(node, link)
        ahead = ReadAhead()
        reader = node.background.once("link_reader", stream.read(requests, _beat_interval_s(hello), ahead))
        taker = node.background.once("link_taker", stream.take_all(ahead))
        try:
            settings, beat = node.settings, beat_to_wire(node.beat())
            answer = pb.NodeHello(
                node_id=settings.node_id,
                incarnation=node.incarnation,
                beat=beat,
                model=hello.model,
                beat_busy=duration(settings.tuning.beat_busy_s),
                beat_idle=duration(settings.tuning.beat_idle_s),
                features=_features(node),
            )
            yield pb.ConnectResponse(hello=answer)
            if node.adapters.able and node.adapters.files.base is not None:  # none, too: a router may remember some
                link.report(report_to_wire(node.adapters.report()))
            async for frame in link.frames():
                yield frame
        finally:
            reader.cancel()
            taker.cancel()
            stream.close()
            node.links.close(link)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        node = self._models.of(request.model).node
        return pb.GetStatusResponse(
            node_id=node.settings.node_id,
            incarnation=node.incarnation,
            beat=beat_to_wire(node.beat()),
            ranks=_ranks(node.host),
            rank_restarts=node.host.losses,
            kv_blocks_held=node.version.stats.blocks_held,
            recent_losses=[loss_to_wire(at, loss) for at, loss in node.host.recent_losses],
            figures=figures_to_wire(node.version),
            protection=self._protection(),
        )

    async def CountPromptTokens(self, request: pb.CountPromptTokensRequest, context: Context) -> pb.CountPromptTokensResponse:
        return pb.CountPromptTokensResponse(
            tokens=await self._models.of(request.model).node.count_tokens(request.model, _prompt(request))
        )

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        async with self._auditor.act(context, "LoadModel", request.model or request.path, self._loaded(request.model)) as act:
            if not request.path:
                raise errors.invalid("path", "must be a directory")
            name = name_from_wire(request.model, "model")
            await self._models.of(name).operations.load(ModelChoice.at(request.path, name))
            act.after = self._loaded(name)
        return pb.LoadModelResponse()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        async with self._auditor.act(context, "UnloadModel", request.model, self._loaded(request.model)):
            await self._models.of(request.model).operations.unload(request.model)
        return pb.UnloadModelResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        settings = self._models.first.node.settings
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else settings.drain_grace_s
        async with self._auditor.act(context, "Drain", settings.node_id, self._drained()) as act:
            unfinished = await self._models.drain(max(0.0, grace_s))
            act.after = {**self._drained(), "unfinished": unfinished}
        return pb.DrainResponse(unfinished=unfinished)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        async with self._auditor.act(context, "Undrain", self._models.first.node.settings.node_id, self._drained()) as act:
            self._models.undrain()
            act.after = self._drained()
        beat = self._models.first.node.beat()
        return pb.UndrainResponse(reason="" if beat.state is NodeState.READY else beat.reason)

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        async with self._auditor.act(context, "Profile", request.model) as act:
            trace = await self._models.of(request.model).operations.profile(request.rank, request.steps)
            act.after = {"rank": request.rank, "trace_bytes": len(trace)}
        return pb.ProfileResponse(chrome_trace=trace)

    async def RecordProfile(
        self, request: pb.RecordProfileRequest, context: Context
    ) -> AsyncIterator[pb.RecordProfileResponse]:
        async with self._auditor.act(context, "RecordProfile", request.model) as act:
            operations, sizes = self._models.of(request.model).operations, dict[int, int]()
            async with operations.profiles("ranks", request.ranks, request.steps) as files:
                for rank, file in files.items():
                    while part := file.read(_PART_BYTES):
                        yield pb.RecordProfileResponse(rank=rank, part=part)
                    sizes[rank] = file.tell()
            act.after = {f"rank_{rank}_trace_bytes": size for rank, size in sizes.items()}

    def _loaded(self, model: str) -> Facts | None:
        """Returns the model that the agent for this name serves."""
        choice = self._models.of(model).node.host.choice
        return None if choice is None else {"model": choice.name, "path": choice.path}

    def _drained(self) -> Facts:
        return {"draining": bool(self._models.first.node.drains)}


def _features(node: NodeAgent) -> list[str]:
    """Returns what a Submit may ask of the node beyond the first version of the protocol."""
    able = [*([CONSTRAINTS] if node.constraints.able else []), *([ADAPTERS] if node.adapters.able else [])]
    return [EXTENDED, TOOLS, PROMPT_CUTS, CACHE_SCOPES, *able]


def _ranks(host: ModelHost) -> list[pb.RankStatus]:
    """Returns the ranks that serve, or those that are there of a group that is being started."""
    if host.serving is not None:
        group, ranks = host.serving.group, list(host.serving.group.progress())
    elif host.starting is not None:
        group, ranks = host.starting, [rank for rank in host.starting.progress() if rank.pid]
    else:
        return []
    resident = dict(enumerate(group.resident_bytes()))  # a rank may write on the board before its process is known
    return [rank_to_wire(rank, resident.get(rank.rank, 0)) for rank in ranks]


async def _hello(requests: AsyncIterator[pb.ConnectRequest]) -> pb.RouterHello:
    first = await anext(requests, None)
    if first is None or not first.HasField("hello"):
        raise errors.invalid("frame", "the first frame must be hello")
    return first.hello


def _beat_interval_s(hello: pb.RouterHello) -> float | None:
    """Returns the router's longest interval between beats; None: it does not promise any."""
    return hello.beat_interval.ToNanoseconds() / 1e9 if hello.HasField("beat_interval") else None


def _prompt(request: pb.CountPromptTokensRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "messages":
            return ChatPrompt(messages_from_wire(request.messages.messages))
        case "conversation":
            return conversation_from_wire(request.conversation)
        case "text":
            return TextPrompt(request.text)
        case _:
            raise errors.invalid("prompt", "either messages or text is required")
