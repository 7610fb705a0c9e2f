"""One router's stream on a scripted node.

Each frame has all tokens generated since the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ryzanstein.generation.request import CACHE_SCOPES
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.lab.bench.router.scripted.script import MODEL, WORD, Script
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

WORKING_BEAT_S = 0.05
IDLE_BEAT_S = 0.5
_CAPACITY = 65536
_CONTEXT_LENGTH = 2**20


class _Rows:
    """A `TokenSink` that adds an answer's tokens to its link's next frame."""

    def __init__(self, link: ScriptedLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def token(self, index: int, token_id: int, last: bool) -> None:
        self._link.add(self._handle, index, token_id, last)


class ScriptedLink:
    """`read` takes the router's frames, `frames` yields the node's; `close` ends what runs."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._sinks: dict[int, _Rows] = {}
        self._output = worker.StepOutput()
        self._news = asyncio.Event()
        self._beats = 0

    async def read(self, requests: AsyncIterator[worker.ConnectRequest]) -> None:
        async for frame in requests:
            self._receive(frame)

    def _receive(self, frame: worker.ConnectRequest) -> None:
        if frame.HasField("submit"):
            self._submit(frame.submit)
        elif frame.HasField("cancel") and (sink := self._sinks.pop(frame.cancel.handle, None)) is not None:
            self._engine.cancel(sink)

    def _submit(self, submit: worker.Submit) -> None:
        sink = self._sinks[submit.handle] = _Rows(self, submit.handle)
        self._output.accepted.add(handle=submit.handle, prompt_tokens=1)
        generated = len(submit.generated[0].token_ids) if submit.generated else 0
        self._engine.begin(sink, Script.read(submit.messages.messages[-1], submit.sampling), generated)

    def add(self, handle: int, index: int, token_id: int, last: bool) -> None:
        output = self._output
        output.handle.append(handle)
        output.choice.append(0)
        output.index.append(index)
        output.token_id.append(token_id)
        output.text.append(WORD)
        if last:
            del self._sinks[handle]
            output.finished.add(handle=handle, reason=inference.FINISH_REASON_LENGTH)
        self._news.set()

    def close(self) -> None:
        for sink in self._sinks.values():
            self._engine.cancel(sink)

    async def frames(self) -> AsyncIterator[worker.ConnectResponse]:
        yield worker.ConnectResponse(
            hello=worker.NodeHello(node_id=MODEL, incarnation="1", beat=self._beat(), features=[CACHE_SCOPES])
        )
        next_beat = 0.0
        while True:
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + (WORKING_BEAT_S if self._sinks else IDLE_BEAT_S)
                yield worker.ConnectResponse(beat=self._beat())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next_beat - now):
                    await self._news.wait()
            if self._news.is_set():
                self._news.clear()
                next_beat = min(next_beat, now + WORKING_BEAT_S)
                yield worker.ConnectResponse(output=self._take())

    def _take(self) -> worker.StepOutput:
        output, self._output = self._output, worker.StepOutput()
        output.step = self._engine.steps
        return output

    def _beat(self) -> worker.Beat:
        self._beats += 1
        return worker.Beat(
            sequence=self._beats,
            state=worker.NODE_STATE_READY,
            model=MODEL,
            context_length=_CONTEXT_LENGTH,
            load=worker.Load(running=self._engine.running, capacity=_CAPACITY),
            step=self._engine.steps,
        )
