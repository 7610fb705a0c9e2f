"""A scripted node: a real gRPC server that speaks WorkerService.Connect and does to a router what nodes do on bad days."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import CONSTRAINTS, Attempt
from ryzanstein.router.assembly import Router, assembled, grpc_face, let_find, peer_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import text_pb2 as text
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub, SessionServiceStub
from ryzanstein.v1.text_pb2_grpc import TextServiceServicer, add_TextServiceServicer_to_server
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from ryzanstein.wire.attempts import attempt_from_wire

MODEL = "demo"
CONTEXT_LENGTH = 4096
PROMPT = 100
"""Tokens of a prompt that is cut, as scripted nodes count."""
INFILL = (1, 2, 3)
"""The tokens of every prompt to fill in the middle."""


def token_id(choice: int, index: int) -> int:
    """What every scripted node generates: a function of (choice, index) alone, as the real sampler's draw is."""
    return 1000 * (choice + 1) + index


def token_text(choice: int, index: int) -> str:
    return f"{choice}.{index} "


RANK_LOST = RyzansteinError("rank 0 died", Code.UNAVAILABLE, "RANK_LOST", {"rank": "0"})
CONTEXT_TOO_LONG = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
NOT_READY = RyzansteinError("recovers", Code.UNAVAILABLE, "NODE_NOT_READY")


class DiedError(Exception):
    """The node dies in the middle of a step: what it had not sent is lost."""


@dataclass(eq=False)
class Running:
    """One attempt on the node."""

    handle: int
    attempt: Attempt
    next_index: list[int]
    left: set[int]


@dataclass(eq=False)
class ScriptedNode(WorkerServiceServicer):
    """One token of every choice each step. The switches may be turned while it runs; wishes (`die_at`, ...) name indices."""

    node_id: str
    step_s: float = 0.002
    state: int = worker.NODE_STATE_READY
    model: str = MODEL
    reason: str = ""
    frozen: bool = False
    """Neither beats nor tokens, but the connection stays."""
    stalled: bool = False
    """Beats, but no tokens."""
    mute_beats: bool = False
    """Tokens, but no beats."""
    deaf: bool = False
    """Reads nothing, while it beats and generates."""
    answers_beats: bool = True
    """False: an older node, which knows of no answer."""
    repeat_rows: bool = False
    """Sends every row twice."""
    gap_at: int | None = None
    torn_columns: bool = False
    """Sends a frame whose columns have different lengths, once."""
    strangers: bool = False
    """Sends rows, ends and failures of handles that nobody submitted."""
    fixed_incarnation: str = ""
    die_at: int | None = None
    swallow: Callable[[worker.Submit], bool] = lambda submit: False
    """Which submits are never beats of again, while the node works for the others."""
    prepares: set[int] | None = None
    """Handles that beats report as `preparing` and that are not accepted until removed. None: no attempt waits."""
    waiting: int = 0
    """Sequences that wait, as its beats say."""
    freeze_at: int | None = None
    """Attempts that reach this index stand still there, while the node works for the others."""
    holds_steps: bool = False
    """Makes no step as long as an attempt stands still: it is slow."""
    computes: bool = False
    """Those that stand still compute their prompts: each step reports a part."""
    preempts: bool = False
    """Those that stand still are reported as preempted."""
    refuse: RyzansteinError | None = None
    refuse_node_fault: bool = False
    context_length: int = CONTEXT_LENGTH
    ranks_lost: bool = False
    """What runs fails as the node's fault, what comes is refused, and the node recovers until this is turned off."""
    other_models: tuple[str, ...] = ()
    """Further models, each on a stream of its own."""
    lost_models: set[str] = field(default_factory=set)
    """As `ranks_lost`, of these further models alone."""
    features: tuple[str, ...] = (CONSTRAINTS,)
    """What it understands beyond the first version of the protocol."""
    numerics: str = ""
    """How it says that it computes."""
    digest: bytes = b""
    """Of its weights."""
    engine: str = ""
    unsupported: tuple[str, ...] = ()
    """What its engine cannot do, as its beats say."""
    inexact: bool = False
    """Its engine continues answers inexactly."""
    reserve: bool = False
    adapters: dict[str, tuple[bytes, int]] | None = None
    """Digest and revision by name: it reports them whenever they change. None: an older node."""
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """Of its model, by name."""
    room: int = 0
    """Tokens of a prompt that may be cut, which it keeps; it says so in every token. 0: it keeps all 7."""
    heeds_kept: bool = True
    """False: it cuts anew, whatever an earlier node has kept."""
    knows_models: bool = True
    """False: an older node, which takes every stream for one of its model."""
    knows_infill: bool = True
    """False: an older node, which makes a plain prompt of a request to fill in the middle."""
    default_tokens: int = 16
    fills: list[text.TokenizeRequest] = field(default_factory=list)
    submits: list[worker.Submit] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    router_beats: list[float] = field(default_factory=list)
    connections: list[dict[int, Running]] = field(default_factory=list)
    port: int = 0
    _server: RpcServer | None = None
    _incarnation: str = ""
    _step: int = 0
    _beats: int = 0
    _parts: int = 0
    _dying: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return sum(len(running) for running in self.connections)

    async def start(self) -> None:
        self._incarnation = self.fixed_incarnation or uuid.uuid4().hex
        self._server = RpcServer("127.0.0.1", self.port, [])
        add_WorkerServiceServicer_to_server(self, self._server.server)
        add_TextServiceServicer_to_server(ScriptedTexts(self), self._server.server)
        await self._server.start()
        self.port = self._server.port

    async def die(self) -> None:
        """Every connection breaks now. `start` brings it back on the same port, as another process."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def Connect(
        self, requests: AsyncIterator[worker.ConnectRequest], context: Any
    ) -> AsyncIterator[worker.ConnectResponse]:
        frames = aiter(requests)
        opening = await anext(frames)
        assert opening.HasField("hello")
        model = opening.hello.model if self.knows_models else ""
        node_id = f"{self.node_id}/{model}" if model else self.node_id
        hello = worker.NodeHello(
            node_id=node_id, incarnation=self._incarnation, beat=self._beat(model), model=model, features=self.features
        )
        yield worker.ConnectResponse(hello=hello)
        running: dict[int, Running] = {}
        self.connections.append(running)
        beats: list[int] = []
        reader = asyncio.create_task(self._read(frames, running, beats))
        try:
            async for frame in self._speak(running, beats, model):
                yield frame
        except DiedError:
            return
        finally:
            reader.cancel()
            self.connections.remove(running)

    async def CountPromptTokens(self, request: worker.CountPromptTokensRequest, context: Any) -> Any:
        if self.refuse is not None:
            raise self.refuse
        prompt = request.text or "".join(message.content for message in request.messages.messages)
        return worker.CountPromptTokensResponse(tokens=len(prompt.split()))

    async def _read(self, frames: AsyncIterator[worker.ConnectRequest], running: dict[int, Running], beats: list[int]) -> None:
        async for frame in frames:
            while self.deaf:  # noqa: ASYNC110 - a switch that any test may turn
                await asyncio.sleep(0.002)
            if frame.HasField("submit"):
                self.submits.append(frame.submit)
                if self.swallow(frame.submit):
                    continue
                if self.prepares is not None:
                    self.prepares.add(frame.submit.handle)
                running[frame.submit.handle] = self._accepted(frame.submit)
            elif frame.HasField("cancel"):
                self.cancels.append(frame.cancel.handle)
                running.pop(frame.cancel.handle, None)
            elif frame.HasField("beat"):
                self.router_beats.append(time.monotonic())
                beats.append(frame.beat.sequence)

    def _accepted(self, submit: worker.Submit) -> Running:
        attempt = attempt_from_wire(submit)
        begun = [len(choice.token_ids) for choice in attempt.generated]
        left = {i for i, choice in enumerate(attempt.generated) if not choice.finished}
        return Running(submit.handle, attempt, begun, left)

    def _lost(self, model: str) -> bool:
        return self.ranks_lost or model in self.lost_models

    def _beat(self, model: str) -> worker.Beat:
        self._beats += 1
        return worker.Beat(
            sequence=self._beats,
            state=worker.NODE_STATE_RECOVERING if self._lost(model) else worker.NodeState.ValueType(self.state),
            model=model or self.model,
            other_models=() if model else self.other_models,
            context_length=self.context_length,
            load=worker.Load(running=self.num_running, waiting=self.waiting, capacity=256),
            step=self._step,
            reason=self.reason,
            numerics=self.numerics,
            weights_digest=self.digest,
            sampling_defaults=inference.SamplingDefaults(**self.sampling_defaults) if self.sampling_defaults else None,
            preparing=self.prepares or (),
            engine=self.engine,
            unsupported=self.unsupported,
            continues_inexactly=self.inexact,
            reserve=self.reserve,
        )

    async def _speak(self, running: dict[int, Running], beats: list[int], model: str) -> AsyncIterator[worker.ConnectResponse]:
        next_beat = 0.0
        known: set[int] = set()
        reported: dict[str, tuple[bytes, int]] | None = None
        while self._server is not None:
            now = time.monotonic()
            if self.adapters != reported:
                reported = dict(self.adapters or {})
                yield worker.ConnectResponse(adapters=_adapters(reported))
            while beats and self.answers_beats and not self.frozen:
                yield worker.ConnectResponse(ack=worker.RouterBeatAck(sequence=beats.pop(0)))
            if now >= next_beat and not (self.frozen or self.mute_beats):
                next_beat = now + (0.05 if self.num_running else 0.5)  # as often as the beat says that it works
                yield worker.ConnectResponse(beat=self._beat(model))
            if running and not (self.frozen or self.stalled):
                self._step += not (self.holds_steps and self._stands_still(running))
                next_beat = min(next_beat, now + 0.05)
                yield worker.ConnectResponse(output=self._output(running, known, model))
            await asyncio.sleep(self.step_s)

    def _stands_still(self, running: dict[int, Running]) -> bool:
        return any(index == self.freeze_at for run in running.values() for index in run.next_index)

    def _output(self, running: dict[int, Running], known: set[int], model: str) -> worker.StepOutput:
        output = worker.StepOutput(step=self._step)
        if self.torn_columns:
            self.torn_columns = False
            output.handle.append(1)
        if self.strangers:
            output.accepted.add(handle=9999, prompt_tokens=1)
            self._row(output, None, 0, 0)
            output.finished.add(handle=9999, reason=1)
            output.failed.add(handle=9999, code=13)
        for run in [each for each in running.values() if each.handle not in (self.prepares or ())]:
            if self._lost(model):
                error = RANK_LOST if run.handle in known else NOT_READY
                self._fail(output, running.pop(run.handle), error, error is RANK_LOST)
                continue
            if run.handle not in known:
                known.add(run.handle)
                refusal = CONTEXT_TOO_LONG if 0 < self.room < self._kept(run) else self.refuse
                if refusal is not None:
                    self._fail(output, running.pop(run.handle), refusal, self.refuse_node_fault)
                    continue
                self._accept(output, run)
            self._rows(output, run)
            if not run.left:
                del running[run.handle]
        return output

    def _accept(self, output: worker.StepOutput, run: Running) -> None:
        kept = self._kept(run)
        output.accepted.add(handle=run.handle, prompt_tokens=kept, omitted_prompt_tokens=PROMPT - kept if self.room else 0)

    def _kept(self, run: Running) -> int:
        given = run.attempt.request.sampling.truncate_prompt_tokens
        return given if given is not None and self.heeds_kept else self.room or 7

    def _fail(self, output: worker.StepOutput, run: Running, error: RyzansteinError, node_fault: bool) -> None:
        failed = output.failed.add(
            handle=run.handle,
            code=error.code,
            reason=error.reason,
            message=error.message,
            metadata=dict(error.metadata),
            node_fault=node_fault,
        )
        if error.retry_after_s is not None:
            failed.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))

    def _rows(self, output: worker.StepOutput, run: Running) -> None:
        end = run.attempt.request.sampling.max_tokens or self.default_tokens
        for choice in sorted(run.left):
            index = run.next_index[choice]
            if index == self.freeze_at:
                if self.computes:
                    self._parts += 1
                    output.prompt_progress.add(handle=run.handle, tokens=self._parts)
                if self.preempts:
                    output.preempted.add(handle=run.handle, choice=choice)
                continue
            if index == self.die_at:
                self.die_at = None
                self._dying = asyncio.create_task(self.die())
                raise DiedError
            if index < end:
                visible = index + 1 if index == self.gap_at else index
                for _ in range(2 if self.repeat_rows else 1):
                    self._row(output, run, choice, visible)
                run.next_index[choice] += 1
            if run.next_index[choice] >= end:
                run.left.discard(choice)
                output.finished.add(handle=run.handle, choice=choice, reason=2, cached_prompt_tokens=3)

    def _row(self, output: worker.StepOutput, run: Running | None, choice: int, index: int) -> None:
        if run is not None and run.attempt.request.sampling.logprobs is not None:
            output.logprob_row.append(len(output.handle))
            output.logprobs.add(logprob=-0.5).top.add(token_id=index, text="t", logprob=-0.5)
        output.handle.append(9999 if run is None else run.handle)
        output.choice.append(choice)
        output.index.append(index)
        output.token_id.append(token_id(choice, index) + (1_000_000 * self._kept(run) if run is not None and self.room else 0))
        output.text.append(token_text(choice, index))


class ScriptedTexts(TextServiceServicer):
    """The tokenizer of a scripted node, which knows only how to fill in the middle."""

    def __init__(self, node: ScriptedNode) -> None:
        self._node = node

    async def Tokenize(self, request: text.TokenizeRequest, context: Any) -> text.TokenizeResponse:
        self._node.fills.append(request)
        while self._node.frozen:  # noqa: ASYNC110 - a switch that any test may turn
            await asyncio.sleep(0.002)
        return text.TokenizeResponse(token_ids=INFILL, infill=self._node.knows_infill, stop_token_ids=[4])


@pytest.fixture
async def start_node() -> AsyncIterator[Callable[..., Awaitable[ScriptedNode]]]:
    """Starts scripted nodes; all are gone at the end."""
    nodes: list[ScriptedNode] = []

    async def start(node_id: str, **switches: Any) -> ScriptedNode:
        node = ScriptedNode(node_id, **switches)
        await node.start()
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        await node.die()


def _adapters(adapters: dict[str, tuple[bytes, int]]) -> worker.NodeAdapters:
    reports = [
        worker.NodeAdapter(adapter=worker.AdapterRef(name=name, digest=digest), revision=revision)
        for name, (digest, revision) in adapters.items()
    ]
    return worker.NodeAdapters(whole=True, adapters=reports)


@dataclass
class RunningRouter:
    """A router with its gRPC face and a client's stubs."""

    router: Router
    server: RpcServer
    inference: Any
    sessions: Any
    peers: RpcServer | None = None

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when it has none yet."""
        return self.router.telemetry.registry.get_sample_value(f"ryzanstein_router_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def running_router(settings: RouterSettings, ready_nodes: int) -> AsyncIterator[RunningRouter]:
    async with assembled(settings) as router:
        server = grpc_face(router, settings)
        await server.start()
        peers = peer_face(router, settings)
        if peers is not None:
            await peers.start()
            let_find(router, settings, peers, server.port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await until(lambda: sum(model.ready_nodes for model in router.core.models()) >= ready_nodes)
            yield RunningRouter(router, server, InferenceServiceStub(channel), SessionServiceStub(channel), peers)
        await server.stop(0)
        if peers is not None:
            await peers.stop(0)


@pytest.fixture
async def start_router(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RunningRouter]]]:
    """Starts routers on given nodes, by default with a state directory of the test's own and no orchestrator."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*nodes: ScriptedNode, ready_nodes: int | None = None, **settings: Any) -> RunningRouter:
            made = RouterSettings(
                **{
                    "grpc_port": 0,
                    "state_dir": tmp_path,
                    "session_store": "memory",
                    "nodes": ",".join(node.address for node in nodes),
                    **settings,
                }
            )
            return await stack.enter_async_context(running_router(made, len(nodes) if ready_nodes is None else ready_nodes))

        yield start


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns as soon as the condition holds; fails when it does not within the bound."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are anything a test can see
            await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    return until
