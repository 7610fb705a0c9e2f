"""An inference server that is already running, as an engine group: found, watched, lost and found again.

The server belongs to its operator. It is never started, stopped or restarted here: a group that is lost
gives its generations up, so that they go on elsewhere, and the next group waits until the server answers.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace

import structlog

from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, SetTokens, StepEvents, SubmitGroup
from ryzanstein.worker.engines.asking import PROTOCOL
from ryzanstein.worker.engines.front.front import Front, front_settings
from ryzanstein.worker.engines.remote.answers.streams import EngineStreams
from ryzanstein.worker.engines.remote.finding import RemoteSpec, found
from ryzanstein.worker.engines.remote.http.faults import (
    EngineFault,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
)
from ryzanstein.worker.engines.remote.silence import Silence
from ryzanstein.worker.engines.vllm.board import RankSteps, failures, read_board, standstill
from ryzanstein.worker.supervision.group import (
    FORWARD,
    IDLE,
    PREFILL,
    EngineModel,
    GroupEvents,
    LossCause,
    RankLoss,
    RankProgress,
    RankStep,
)
from ryzanstein.worker.supervision.messages import EngineMessage, ProfileTrace, RankReady, StartProfile
from ryzanstein.worker.supervision.stacks import ProcessStacks

log = structlog.get_logger(__name__)

_TELL_PREFILL_S = 1.0
_BUSY = 2.0
"""A server that computes prompts may take so many times as long to answer."""


class RemoteGroup:
    """An `EngineGroup` of one server, which counts as one rank.

    `on_new` is called when the server was seen to be gone, or to answer: it is another one, or sound again.
    """

    def __init__(self, spec: RemoteSpec, model: EngineModel, events: GroupEvents, on_new: Callable[[], None]) -> None:
        self._spec, self._model, self._events, self._on_new = spec, model, events, on_new
        self._bounds = spec.bounds
        self._client = spec.new_client()
        self._streams: EngineStreams | None = None
        self._front: Front | None = None
        self._silence = Silence(self._bounds.stall, self._bounds.prefill_s, self._bounds.watch_interval_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_parts, self._moved_s = 0, time.monotonic()
        self._told_s = self._checked_s = time.monotonic()
        self._sound_s = 0.0
        self._checking = False
        self._num_failures = 0
        self.lost: asyncio.Future[RankLoss] = asyncio.get_running_loop().create_future()

    async def start(self) -> list[RankReady]:
        """See `EngineGroup.start`. Waits for the server, however long it loads, up to `start_s`."""
        began_s, served = time.monotonic(), await found(self._client, self._spec, self._on_new)
        self._num_failures = self._failures()
        if served.vocabulary not in (0, self._model.vocab_size):
            sizes = {"engine_vocabulary": served.vocabulary, "model_vocabulary": self._model.vocab_size}
            log.warning("engine may have another model", engine=self._spec.address, model=self._model.path, **sizes)
        context_length = min(served.context_length or self._model.context_length, self._model.context_length)
        vocabulary = min(served.vocabulary or self._model.vocab_size, self._model.vocab_size)
        served = replace(served, vocabulary=vocabulary, context_length=context_length)
        num_places = min(served.max_sequences or self._spec.max_sequences, self._spec.max_sequences)
        self._streams = EngineStreams(self._client, served, self)
        if self._model.token_table:
            self._streams.know(self._model.token_table)
            await self._streams.learned()
        settings = front_settings(context_length, num_places, self._spec.prefill_room, self._spec.queue)
        self._front = self._streams.front = Front(settings, self._streams, self._on_step, measured=self._measure)
        self._spawn(self._watch())
        return [
            RankReady(
                rank=0,
                context_length=context_length,
                num_blocks=0,
                block_size=1,
                max_sequences=num_places,
                startup_phases={"probe": round(time.monotonic() - began_s, 3)},
                kernels=served.version,
                company_matters="the engine is not ours",
                numerics=f"engine={served.version}" + (f" sampler={PROTOCOL}" if served.exact else ""),
                engine=served.version + (f", sampler {PROTOCOL}" if served.exact else ""),
                unsupported=sorted(served.unsupported),
                continues_exactly=served.exact,
            )
        ]

    def send(self, message: EngineMessage) -> None:
        """See `EngineGroup.send`. What concerns blocks and pages is never sent to such a group."""
        match message:
            case SetTokens(table) if self._streams is not None:
                self._streams.know(table)
            case SubmitGroup() | CancelGroup() | FinishChoice() if self._front is not None:
                self._front.send(message)
            case StartProfile((rank, *_), steps, number) if steps:
                error = f"the engine at {self._spec.address} has a profiler of its own"
                asyncio.get_running_loop().call_soon(self._events.on_trace, ProfileTrace(rank, b"", number, error))

    async def obeyed(self) -> None:
        """See `EngineGroup.obeyed`. A server has taken what it was sent."""

    def slab(self, size_bytes: int) -> mmap.mmap:
        """See `EngineGroup.slab`. Raises OSError: pages do not leave a server."""
        raise OSError(f"the engine at {self._spec.address} moves no pages")

    def progress(self) -> list[RankProgress]:
        """See `EngineGroup.progress`. A step is a part that arrived. Nothing arrives while it computes prompts alone."""
        return [self._progress(PREFILL if self._only_prompts else FORWARD)]

    @property
    def _only_prompts(self) -> bool:
        """Whether no answer has begun, so that nothing may come from the server."""
        return self._front is None or len(self._front.prefilling) == len(self._front)

    def steps(self, step: int) -> Sequence[RankStep]:
        """See `EngineGroup.steps`. What a server does in a step is not known."""
        return []

    def slowness(self) -> Mapping[int, float]:
        return {}

    def resident_bytes(self) -> Sequence[int]:
        return [0]

    def private_bytes(self) -> Sequence[int]:
        return [0]

    async def stacks(self, watched_s: float) -> Sequence[ProcessStacks]:
        """See `EngineGroup.stacks`. Nothing is known of processes that are somebody else's."""
        return []

    async def end(self, *, graceful: bool) -> None:
        """Closes all connections, by which the server forgets what runs."""
        self.lost.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._front is not None:
            self._front.close()
        if self._streams is not None:
            await self._streams.close()
        await self._client.close()

    def on_part(self) -> None:
        """See `StreamListener.on_part`. What our sampler has not decided is not passed on."""
        self._num_parts += 1
        self._moved_s = time.monotonic()
        before, self._num_failures = self._num_failures, self._failures()
        if self._num_failures > before:
            self._lose(
                LossCause.UNSOUND, f"our sampler in the engine at {self._spec.address} failed; the engine's log says why"
            )

    def on_cut(self, error: EngineUnreachable) -> None:
        """Asks at once whether the server is still there: one connection may break alone."""
        log.warning("stream of an engine was cut", engine=self._spec.address, reason=str(error))
        self._check_soon()

    def on_nonsense(self, error: EngineProtocolError) -> None:
        """See `StreamListener.on_nonsense`."""
        self._lose(LossCause.UNSOUND, f"the engine at {self._spec.address} sent nonsense: {error}")

    def _on_step(self, events: StepEvents) -> None:
        """Passes events on, but for those of a lost group: its generations have failed, and its counts are forgotten."""
        if not self.lost.done():
            self._events.on_step(events)

    def _measure(self, passed_s: float, num_prompt: int) -> None:
        if num_prompt:
            self._silence.prompt(passed_s, num_prompt)
        else:
            self._silence.token(passed_s)

    def _progress(self, phase: str) -> RankProgress:
        """Returns what the server does, as a rank. Its step is as large as the largest prompt that it computes."""
        front = self._front
        if front is None or not len(front):
            return RankProgress(0, 0, self._num_parts, 0, IDLE, self._moved_s, 0.0, 0, 0.0)
        num_tokens = max((sequence.num_tokens for sequence in front.prefilling), default=0) + len(front)
        return RankProgress(0, 0, self._num_parts, 0, phase, self._moved_s, self._moved_s, num_tokens, 0.0)

    async def _watch(self) -> None:
        """Finds stalls, and asks for the server's health while nothing runs.

        Of a prompt nothing may come for long. A server that is stopped as a whole shows sooner: it answers nobody.
        """
        front, self._sound_s = self._front, time.monotonic()
        while front is not None and not self.lost.done():
            await asyncio.sleep(self._bounds.watch_interval_s)
            now = time.monotonic()
            prompts = [sequence.num_tokens for sequence in front.prefilling]
            if self._silence.observe(now, self._num_parts, prompts, pending=len(front) > 0):
                what = f"has sent nothing for {self._silence.silent_s:.1f} s while it computes {len(front)} answers"
                self._stall(what, now)
            elif self._stopped_for(now) >= self._bounds.stall.min_s:
                self._stall("computes nothing", now)
            elif self._only_prompts and now - max(self._checked_s, self._moved_s) >= self._bounds.check_s:
                self._check_soon()
            if front.prefilling and now - self._told_s >= _TELL_PREFILL_S:
                self._told_s = now
                for sequence in front.prefilling:
                    front.computing(sequence)

    def _ranks(self) -> list[RankSteps]:
        """Returns where the server's ranks are; none if it does not tell."""
        return [] if self._spec.board is None else read_board(self._spec.board)

    def _failures(self) -> int:
        return 0 if self._spec.board is None else failures(self._spec.board)

    def _stopped_for(self, now: float) -> float:
        """Returns for how long a rank's process has been stopped. No statistics are needed to know that it hangs."""
        if not any(each.stopped for each in self._ranks()):
            self._sound_s = now
        return now - self._sound_s

    def _stall(self, what: str, now: float) -> None:
        rank, where = standstill(self._ranks(), now)
        self._lose(LossCause.STALLED, f"the engine at {self._spec.address} {what}{f'; {where}' if where else ''}", rank)

    def _check_soon(self) -> None:
        if not self._checking and not self.lost.done():
            self._checking = True
            self._spawn(self._check())

    async def _check(self) -> None:
        try:
            if self._front is None or not len(self._front):
                await self._client.healthy(self._bounds.health_s)
            else:
                await self._client.answers(_BUSY * self._bounds.health_s)
        except EngineRefused as error:
            self._lose(LossCause.DIED, f"the engine at {self._spec.address} says that it is not healthy: {error}")
        except EngineFault as error:
            # A process that is stopped still takes connections: the machine does that for it.
            hangs = isinstance(error.__cause__, TimeoutError)
            text = "answers nobody" if hangs else "is gone"
            self._lose(LossCause.STALLED if hangs else LossCause.DIED, f"the engine at {self._spec.address} {text}: {error}")
        finally:
            self._checking, self._checked_s = False, time.monotonic()

    def _lose(self, cause: LossCause, text: str, rank: int = 0) -> None:
        if not self.lost.done():
            self.lost.set_result(RankLoss(rank, cause, text))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("watching an engine failed", exc_info=error)
            self._lose(LossCause.DIED, f"the watch of the engine failed: {error!r}")


class RemoteEngines:
    """An `EngineFactory` of groups that all use the same server."""

    def __init__(self, spec: RemoteSpec, model: EngineModel, events: GroupEvents) -> None:
        self._spec, self._model, self._events = spec, model, events
        self.condemned = False

    @property
    def model(self) -> str:
        return self._model.path

    def make(self) -> RemoteGroup:
        """See `EngineFactory.make`."""
        return RemoteGroup(self._spec, self._model, self._events, self._on_new)

    async def lost(self, loss: RankLoss, *, served: bool) -> None:
        """See `EngineFactory.lost`. Whoever runs the server restarts it."""
        self.condemned = self.condemned or loss.cause in (LossCause.STALLED, LossCause.UNSOUND)

    def _on_new(self) -> None:
        self.condemned = False

    async def close(self, *, sleeps: bool = False) -> None:
        """See `EngineFactory.close`. Others may use the server: it is not put to sleep."""
