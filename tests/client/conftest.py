"""Routers that give a fixed answer, and break as a test wishes; and both clients behind one face."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from ryzanstein import errors
from ryzanstein.client import AsyncClient, Client
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.status import status_from_error
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc as rpc

TOKENS = tuple(range(100, 140))
NODES = ("node-0", "node-1")


@dataclass
class ClusterScript:
    """What all routers of a test share: the generations, by their keys. Tokens up to `moves_at` are of the first node."""

    moves_at: int = 100
    num_tokens: int = len(TOKENS)
    step_s: float = 0.0
    generations: dict[str, str] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_choices: int = 1


@dataclass
class RouterScript:
    """What one router does: each call takes the next of `breaks`, when there is one.

    A break is a number of tokens after which the stream breaks, an error at its beginning, or both.
    """

    breaks: list[tuple[int, RyzansteinError | grpc.StatusCode | str]] = field(default_factory=list)
    attached: list[dict[int, int]] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)


class FakeRouter(rpc.InferenceServiceServicer):
    """A router over a real connection."""

    def __init__(self, cluster: ClusterScript, script: RouterScript) -> None:
        self.cluster, self.script = cluster, script
        self.server = grpc.server(ThreadPoolExecutor(16))
        rpc.add_InferenceServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def close(self) -> None:
        self.server.stop(0).wait()

    def StreamChat(self, request: Any, context: Any) -> Iterator[Any]:
        key, cluster = request.chat.request_id, self.cluster
        self._note(request.chat, context)
        if key not in cluster.generations or not key:
            cluster.generations[key] = f"generation-{len(cluster.begun)}"
            cluster.begun.append(key)
        for event in self._events(cluster.generations[key], {}, context):
            yield pb.StreamChatResponse(event=event)

    def AttachGeneration(self, request: Any, context: Any) -> Iterator[Any]:
        self._note(request, context)
        self.script.attached.append(dict(request.from_index))
        for event in self._events(request.generation_id, request.from_index, context):
            yield pb.AttachGenerationResponse(event=event)

    def CancelGeneration(self, request: Any, context: Any) -> Any:
        self.cluster.cancelled.append(request.generation_id)
        return pb.CancelGenerationResponse()

    def ListModels(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        _, how = self.script.breaks.pop(0) if self.script.breaks else (0, "")
        self._break(how, context)
        return pb.ListModelsResponse(models=[pb.Model(name="m")])

    def _note(self, request: Any, context: Any) -> None:
        self.script.requests.append(request)
        self.script.metadata.append(dict(context.invocation_metadata()))

    def _events(self, generation_id: str, from_index: Any, context: Any) -> Iterator[pb.GenerationEvent]:
        after, how = self.script.breaks.pop(0) if self.script.breaks else (10**9, "")
        if after < 0:
            self._break(how, context)
        yield pb.GenerationEvent(
            started=pb.GenerationStarted(generation_id=generation_id, model="m", node_id=NODES[0], prompt_tokens=7)
        )
        sent, cluster = 0, self.cluster
        for index in range(cluster.num_tokens):
            for choice in range(cluster.num_choices):
                if index < from_index.get(choice, 0):
                    continue
                if generation_id in cluster.cancelled:
                    yield from self._finished(pb.FINISH_REASON_CANCELLED)
                    return
                if sent >= after:
                    if how == "gap":
                        yield self._delta(choice, index + 1)
                    self._break(how, context)
                    return
                sent += 1
                yield self._delta(choice, index)
            time.sleep(cluster.step_s)
        yield from self._finished(pb.FINISH_REASON_STOP)

    def _delta(self, choice: int, index: int) -> pb.GenerationEvent:
        token_id, node = TOKENS[index % len(TOKENS)], NODES[index >= self.cluster.moves_at]
        return pb.GenerationEvent(
            delta=pb.GenerationDelta(choice=choice, first_index=index, token_ids=[token_id], text=f"{token_id} ", node_id=node)
        )

    def _finished(self, reason: Any) -> Iterator[pb.GenerationEvent]:
        usage = pb.Usage(prompt_tokens=7, completion_tokens=self.cluster.num_tokens)
        for choice in range(self.cluster.num_choices):
            yield pb.GenerationEvent(finished=pb.GenerationFinished(choice=choice, finish_reason=reason, usage=usage))

    def _break(self, how: Any, context: Any) -> None:
        if isinstance(how, RyzansteinError):
            context.abort_with_status(rpc_status.to_status(status_from_error(how)))
        if isinstance(how, grpc.StatusCode):
            context.abort(how, "the connection was reset")
        if how == "silence":
            gone = threading.Event()
            context.add_callback(gone.set)
            gone.wait(20)


@pytest.fixture
def cluster() -> ClusterScript:
    return ClusterScript()


@pytest.fixture
def start_router(cluster: ClusterScript) -> Iterator[Callable[..., FakeRouter]]:
    """Starts routers, which share the cluster's generations."""
    routers: list[FakeRouter] = []

    def start(*breaks: Any) -> FakeRouter:
        routers.append(FakeRouter(cluster, RouterScript(list(breaks))))
        return routers[-1]

    yield start
    for router in routers:
        router.close()


class BothFaces:
    """The same calls for both clients. `asked` does something while a stream is read, at each of its events."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def chat(self, addresses: Any, text: Any = "hello", *, on_event: Any = None, client: Any = None, **options: Any) -> Any:
        """Returns the answer and its events."""
        settings = {"patience_s": 2.0, **(client or {})}
        if self.kind == "sync":
            with Client(addresses, **settings) as made, made.stream(text, **options) as stream:
                events = []
                for event in stream:
                    events.append(event)
                    if on_event is not None and on_event(event, stream) == "leave":
                        break
            return stream.answer, events

        async def ask() -> Any:
            async with AsyncClient(addresses, **settings) as made, made.stream(text, **options) as stream:
                events = []
                async for event in stream:
                    events.append(event)
                    done = on_event(event, stream) if on_event is not None else None
                    if asyncio.iscoroutine(done):
                        await done
                    elif done == "leave":
                        break
            return stream.answer, events

        return asyncio.run(ask())

    def call(self, addresses: Any, method: str, *arguments: Any, **settings: Any) -> Any:
        """Returns what a method of the client returns."""
        settings = {"patience_s": 2.0, **settings}
        if self.kind == "sync":
            with closing(Client(addresses, **settings)) as made:
                return getattr(made, method)(*arguments)

        async def ask() -> Any:
            async with AsyncClient(addresses, **settings) as made:
                return await getattr(made, method)(*arguments)

        return asyncio.run(ask())


@pytest.fixture(params=["sync", "async"])
def faces(request: pytest.FixtureRequest) -> BothFaces:
    return BothFaces(request.param)


@pytest.fixture
def refused() -> Any:
    """The errors of the domain."""
    return errors
