"""A node without a model, as a process: `python -P -m ryzanstein.lab.bench.router.scripted.node`.

It prints its port. With a directory of certificates as its argument it listens with TLS alone. It
serves the same answers in two ways: to a router on `WorkerService.Connect`, one frame for all that
runs; and to any other client on `InferenceService.StreamChat`, one stream per request and one
message per token, as a server behind a proxy does.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from prometheus_client import CollectorRegistry

from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.lab.bench.router.scripted.link import ScriptedLink
from ryzanstein.lab.bench.router.scripted.script import MODEL, WORD, Script
from ryzanstein.observe import log as logs
from ryzanstein.rpc.server import RpcServer, terminated
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.service_tls import ServiceTls

_PROMPT_TOKENS = 1


class ScriptedWorker(WorkerServiceServicer):
    """The service for routers: one stream per router."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def GetStatus(self, request: worker.GetStatusRequest, context: Any) -> worker.GetStatusResponse:
        return worker.GetStatusResponse(node_id=MODEL)

    async def Connect(
        self, requests: AsyncIterator[worker.ConnectRequest], context: Any
    ) -> AsyncIterator[worker.ConnectResponse]:
        link = ScriptedLink(self._engine)
        reader = asyncio.create_task(link.read(requests))
        try:
            async for frame in link.frames():
                yield frame
        finally:
            reader.cancel()
            link.close()


class _Tokens:
    """A `TokenSink` whose tokens are awaited one by one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, bool]] = deque()
        self._news = asyncio.Event()

    def token(self, index: int, token_id: int, last: bool) -> None:
        self._waiting.append((index, token_id, last))
        self._news.set()

    async def next(self) -> tuple[int, int, bool]:
        if not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()


class ScriptedChat(InferenceServiceServicer):
    """The service behind a proxy: one stream per request."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def StreamChat(
        self, request: inference.StreamChatRequest, context: Any
    ) -> AsyncIterator[inference.StreamChatResponse]:
        script, tokens, last = Script.read(request.chat.messages[-1], request.chat.sampling), _Tokens(), False
        self._engine.begin(tokens, script)
        try:
            yield _response(started=inference.GenerationStarted(model=MODEL, node_id=MODEL, prompt_tokens=_PROMPT_TOKENS))
            while not last:
                index, token_id, last = await tokens.next()
                yield _response(
                    delta=inference.GenerationDelta(first_index=index, token_ids=[token_id], text=WORD, node_id=MODEL)
                )
            usage = inference.Usage(prompt_tokens=_PROMPT_TOKENS, completion_tokens=script.tokens)
            yield _response(finished=inference.GenerationFinished(finish_reason=inference.FINISH_REASON_LENGTH, usage=usage))
        finally:
            self._engine.cancel(tokens)


def _response(**event: Any) -> inference.StreamChatResponse:
    return inference.StreamChatResponse(event=inference.GenerationEvent(**event))


def _tls(directory: str) -> ServiceTls:
    from ryzanstein.rpc.tls.service_tls import ServiceTls

    return ServiceTls.open(Path(directory), DEFAULT_TRUST, Peer(PeerRole.NODE), TlsMetrics("worker", CollectorRegistry()))


async def serve(tls_dir: str = "") -> None:
    """Serves until SIGTERM."""
    # The library's server, as nodes have it: what is measured must not depend on a node that costs less than real ones.
    rpc, engine = RpcServer("127.0.0.1", 0, [], tls=_tls(tls_dir) if tls_dir else None, builtin=False), ScriptedEngine()
    # Abstract methods answer UNIMPLEMENTED.
    add_WorkerServiceServicer_to_server(ScriptedWorker(engine), rpc.server)  # type: ignore[abstract]
    add_InferenceServiceServicer_to_server(ScriptedChat(engine), rpc.server)  # type: ignore[abstract]
    await rpc.start()
    print(rpc.port, flush=True)
    await terminated()
    await rpc.stop(0)


if __name__ == "__main__":
    # Standard output is only for the port.
    logs.setup("node", "warning")
    uvloop.run(serve(*sys.argv[1:2]))
