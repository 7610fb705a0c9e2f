"""One router's stream on a stand-in: it beats and acknowledges as a node does, idle or at work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ryzanstein.cluster import Beat, Load, NodeState, Numerics
from ryzanstein.generation.request import CACHE_SCOPES
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.lab.bench.router.scripted.link import IDLE_BEAT_S, WORKING_BEAT_S, ScriptedLink
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.worker.agent.routers import QUIET_AFTER_S

CAPACITY, CONTEXT_LENGTH = 64, 32_768
_BLOCKS = 4096
ROUTER_SILENCE_S = 5.0
_BEATS_MISSED, _LATE = 4, 1.25
# As long as those of a node.
_NUMERICS = "cpu bfloat16 float32 avx512_bf16 int8 blocks 32 groups 128 heads 64 rope 10000 kernels 41 torch 2.11.0"
_DIGEST = bytes(32)
_COMPUTED = Numerics(_NUMERICS, _DIGEST)


@dataclass(slots=True)
class StandInState:
    """What a stand-in says of itself in its beats. `busy`: it seems to work, whether or not an answer runs."""

    node_id: str
    models: tuple[str, ...]
    busy: bool = False
    beats: int = 0
    incarnation: str = "1"

    def name_of(self, model: str) -> str:
        """Returns the node's name on a stream about a model, empty for the first."""
        return f"{self.node_id}/{model}" if model else self.node_id

    def beat(self, model: str, running: int) -> worker.Beat:
        self.beats += 1
        first = model == self.models[0]
        return worker.Beat(
            sequence=self.beats,
            state=worker.NODE_STATE_READY,
            model=model,
            context_length=CONTEXT_LENGTH,
            load=worker.Load(
                running=running or int(self.busy), capacity=CAPACITY, kv_blocks_used=running, kv_blocks_total=_BLOCKS
            ),
            step=self.beats,  # work that is pending moves
            other_models=self.models[1:] if first else (),
            numerics=_NUMERICS,
            weights_digest=_DIGEST,
        )

    def report(self, running: int) -> Beat:
        """Returns what `beat` says of the first model, for the orchestrator."""
        self.beats += 1
        return Beat(
            self.beats,
            NodeState.READY,
            self.models[0],
            CONTEXT_LENGTH,
            Load(running or int(self.busy), 0, CAPACITY, running, _BLOCKS),
            self.beats,
            other_models=self.models[1:],
            numerics=_COMPUTED,
        )


class StandInLink(ScriptedLink):
    """A link to one model. `wake` after the state changed. It ends when its router is silent, as a node's does.

    `quiet_s`: it beats so seldom, in answer to its router's beats, when no answer has run here for a while; 0: never.
    """

    def __init__(self, engine: ScriptedEngine, state: StandInState, model: str, quiet_s: float = 0.0) -> None:
        super().__init__(engine)
        self._state, self._model, self._quiet_s = state, model, quiet_s
        self._worked_at = time.monotonic()
        self._to_acknowledge = 0
        self._told_work = False
        self._heard_at = time.monotonic()
        self._surely_s = min(_BEATS_MISSED * quiet_s or ROUTER_SILENCE_S, ROUTER_SILENCE_S)

    @property
    def alive(self) -> bool:
        """Whether its router was heard lately: a process that stood still has links that are gone."""
        heard_s = time.monotonic() - self._heard_at
        # This is asked of every link 20 times a second, and whether it is quiet matters to few.
        return heard_s < self._surely_s or heard_s < (_BEATS_MISSED * self._quiet_s if self._quiet else ROUTER_SILENCE_S)

    @property
    def _quiet(self) -> bool:
        if self._sinks:
            self._worked_at = time.monotonic()
        return self._quiet_s > 0 and time.monotonic() >= self._worked_at + QUIET_AFTER_S

    @property
    def running(self) -> int:
        """Returns how many answers run."""
        return len(self._sinks)

    def wake(self) -> None:
        self._news.set()

    def _receive(self, frame: worker.ConnectRequest) -> None:
        self._heard_at = time.monotonic()
        if frame.HasField("beat"):
            self._to_acknowledge = frame.beat.sequence
            self._news.set()
        else:
            super()._receive(frame)

    def _beat(self) -> worker.Beat:
        beat = self._state.beat(self._model or self._state.models[0], len(self._sinks))
        beat.quiet, self._told_work = self._quiet, beat.load.running > 0
        if beat.quiet:
            beat.ack, self._to_acknowledge = self._to_acknowledge, 0
        return beat

    @property
    def _interval_s(self) -> float:
        if self._quiet:
            return _LATE * self._quiet_s
        # After a beat with work a router expects the next one soon, even if the work has ended since.
        return WORKING_BEAT_S if self._sinks or self._state.busy or self._told_work else IDLE_BEAT_S

    async def frames(self) -> AsyncIterator[worker.ConnectResponse]:
        state = self._state
        hello = worker.NodeHello(
            node_id=state.name_of(self._model), incarnation=state.incarnation, beat=self._beat(), features=[CACHE_SCOPES]
        )
        hello.model = self._model
        yield worker.ConnectResponse(hello=hello)
        last_beat = time.monotonic()
        while self.alive:
            await self._news_within(last_beat + self._interval_s - time.monotonic())
            if self._to_acknowledge and self._quiet:
                last_beat = time.monotonic()
                yield worker.ConnectResponse(beat=self._beat())
            elif self._to_acknowledge:
                sequence, self._to_acknowledge = self._to_acknowledge, 0
                yield worker.ConnectResponse(ack=worker.RouterBeatAck(sequence=sequence))
            if self._output.handle or self._output.accepted:
                yield worker.ConnectResponse(output=self._take())
            if time.monotonic() >= last_beat + self._interval_s:
                last_beat = time.monotonic()
                yield worker.ConnectResponse(beat=self._beat())

    async def _news_within(self, seconds: float) -> None:
        """Returns when there is news, or the time is over. A bare timer: `asyncio.timeout` costs each frame more."""
        timer = asyncio.get_running_loop().call_later(seconds, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
