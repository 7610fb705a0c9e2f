"""The ranks of a node as one unit: forked together, lost together.

A group is used once: `start`, use, `lost`, `end`. For ranks after a loss the caller makes a new
group, with new channels and boards, so that nothing of a lost group can reach its successor.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import structlog
from pydantic import Field

from ryzanstein.bounds import PositiveSeconds, Seconds
from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.ranks.channel import AgentChannel
from ryzanstein.worker.ranks.health.board import Board
from ryzanstein.worker.ranks.health.last_words import summary
from ryzanstein.worker.ranks.health.skew import CollectiveSample, recorded_steps
from ryzanstein.worker.ranks.health.slowness import SlowBounds, Slowness, SlowRank
from ryzanstein.worker.ranks.messages import (
    PEER_LOST,
    AgentMessage,
    CheckRanks,
    RankCrashed,
    RankMessage,
    RankRefused,
    RankSpec,
)
from ryzanstein.worker.ranks.starting.forking import ForkFailed, ForkServerLost
from ryzanstein.worker.ranks.starting.process import end, exit_text
from ryzanstein.worker.ranks.starting.source import ForkedRank, RankServer
from ryzanstein.worker.supervision.group import (
    COMPILE,
    GroupEvents,
    LossCause,
    RankLoss,
    RankProgress,
    RanksLost,
    RanksRefused,
    RankStep,
)
from ryzanstein.worker.supervision.messages import PagesAnswer, ProfileTrace, RankReady
from ryzanstein.worker.supervision.stacks import ProcessStacks
from ryzanstein.worker.supervision.watchdog import IdleChecks, StallBounds, Watchdog

log = structlog.get_logger(__name__)

_BLAME_WAIT_S = 0.25
_LAST_WORDS_S = 0.02
_NAMED_WITHIN_S = 0.005
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """Time limits of a group, in seconds."""

    start_s: PositiveSeconds = 300.0
    """A start is given up when no rank has moved for so long."""
    watch_interval_s: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Interval of the watchdog's checks."""
    stop_grace_s: Seconds = 2.0
    """From SIGTERM to SIGKILL."""
    stall: StallBounds = field(default_factory=StallBounds)
    slow: SlowBounds = field(default_factory=SlowBounds)
    idle_check_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    """Interval of checks of idle ranks; 0: never."""


class RankGroup:
    """A group of ranks: the native `EngineGroup`.

    The server belongs to the caller and outlives the group. OSError: there are not enough descriptors.
    """

    def __init__(self, spec: RankSpec, bounds: GroupBounds, events: GroupEvents, server: RankServer) -> None:
        loop = asyncio.get_running_loop()
        self._spec, self._bounds, self._events, self._server = spec, bounds, events, server
        self._log = log.bind(node_id=spec.node_id) if spec.node_id else log
        self._processes: list[ForkedRank] = []
        self._channels: list[AgentChannel[RankMessage]] = []
        self._wiring = server.wire(spec)
        try:
            self._board = Board(self._wiring.board_fd, spec.tp)
            self._slab_fd = self._wiring.take_slab()
        except BaseException:
            self._wiring.close()
            raise
        self._watchdog = Watchdog(bounds.stall, bounds.watch_interval_s)
        self._slowness = Slowness(bounds.slow)
        self._collectives = CollectiveSample(self._board, spec.tp)
        self._checks = IdleChecks(bounds.idle_check_s)
        self._named_slow: int | None = None
        self._answers: list[RankReady] = []
        self._fed_tokens = 0
        self._sent = self._taken = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._compiles = False
        self._ready: asyncio.Future[list[RankReady]] = loop.create_future()
        self._watch: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[RankLoss] = loop.create_future()
        self.lost.add_done_callback(lambda _: self._tell_taken())
        server.lost.add_done_callback(self._on_server_lost)

    async def start(self) -> list[RankReady]:
        """Forks all ranks; returns what each reported when it was ready, by rank.

        A start that moves takes as long as it takes: a large model from a slow volume loads for many
        minutes. It is given up when no rank has moved for `start_s`.

        Raises RanksLost or RanksRefused. After an error or a cancellation, call `end`.
        """
        await self._server.prepare(self._spec, self._begin_to_compile)
        self._compiles = False
        try:
            async with asyncio.timeout(self._bounds.start_s) as limit:
                await self._fork(limit)
                answers = await self._answered(limit)
        except TimeoutError:
            raise RanksLost(self._late()) from None
        except ForkServerLost as lost:
            raise RanksLost(_server_loss(str(lost))) from None
        except ForkFailed as failure:
            rank = len(self._processes)
            raise RanksLost(RankLoss(rank, LossCause.DIED, f"rank {rank} could not be forked: {failure}")) from None
        warm_up_s = max(answer.startup_phases.get("warm_up", 0.0) for answer in answers)
        self._watchdog.record(warm_up_s, self._spec.settings.max_tokens_per_step)
        self._watch = asyncio.create_task(self._watch_progress())
        self._watch.add_done_callback(self._on_unwatched)
        return answers

    def send(self, message: AgentMessage) -> None:
        """Sends a message to rank 0. Never waits. FrameTooLarge: nothing was sent."""
        self._channels[0].send(message)
        self._sent += 1

    async def obeyed(self) -> None:
        """See `EngineGroup.obeyed`. Rank 0 tells what it has taken, and passes a check on, which the others answer."""
        if self.lost.done():
            return
        if self._spec.tp > 1:
            self.send(CheckRanks(self._checks.next()))
        sent, check = self._sent, self._checks.number
        if self._taken < sent:
            taken = asyncio.get_running_loop().create_future()
            self._waiting.append((sent, taken))
            await taken
        while not self.lost.done() and not self._answered_by_all(check):  # noqa: ASYNC110 (on the board, by other processes)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _answered_by_all(self, check: int) -> bool:
        return all(rank.answered >= check for rank in self._board.read()[1:])

    def slab(self, size_bytes: int) -> mmap.mmap:
        """See `EngineGroup.slab`. The memory is allocated now: a rank could not report that there is none."""
        os.posix_fallocate(self._slab_fd, 0, size_bytes)
        return mmap.mmap(self._slab_fd, size_bytes)

    def progress(self) -> list[RankProgress]:
        """Returns what each rank does now."""
        ranks = self._board.read()
        return [replace(rank, phase=COMPILE) for rank in ranks] if self._compiles else ranks

    def _begin_to_compile(self) -> None:
        self._compiles = True

    def steps(self, step: int) -> list[RankStep]:
        """See `EngineGroup.steps`."""
        return recorded_steps(self._board, self._spec.tp, step)

    def slowness(self) -> Mapping[int, float]:
        """Returns how long each rank computes, relative to the median of the others.

        Empty until that is known, or with one rank.
        """
        return self._slowness.ratios

    def resident_bytes(self) -> list[int]:
        return [process.resident_bytes for process in self._processes]

    def private_bytes(self) -> list[int]:
        return [process.private_bytes for process in self._processes]

    async def stacks(self, watched_s: float) -> list[ProcessStacks]:
        """See `EngineGroup.stacks`. Ranks are asked at the same time."""
        return list(await asyncio.gather(*(process.stacks(watched_s) for process in self._processes)))

    async def end(self, *, graceful: bool) -> None:
        """Ends all ranks; no rank runs when it returns (but see `process.end`).

        Without grace they are killed at once.
        """
        if self._watch is not None:
            self._watch.cancel()
        self._server.lost.remove_done_callback(self._on_server_lost)
        for future in (self._ready, self.lost):
            future.cancel()
        await end(self._processes, self._bounds.stop_grace_s if graceful else 0.0)
        for channel in self._channels:
            channel.close()
        self._wiring.close()
        self._board.close()
        if self._slab_fd >= 0:
            os.close(self._slab_fd)
            self._slab_fd = -1

    async def _fork(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        with self._wiring as wiring:
            for wires in wiring.ranks:
                rank = wires.start.rank
                process = await self._server.fork(rank, wires.fds)
                limit.reschedule(loop.time() + self._bounds.start_s)
                process.dying.add_done_callback(partial(self._on_dying, rank))
                process.exited.add_done_callback(partial(self._on_exit, rank))
                self._processes.append(process)
        for wires in wiring.ranks:
            channel = AgentChannel[RankMessage](RankMessage, self._on_message, partial(self._on_closed, wires.start.rank))
            self._channels.append(channel)
            await wires.connect(channel)
            channel.send(wires.start)

    async def _answered(self, limit: asyncio.Timeout) -> list[RankReady]:
        either: list[asyncio.Future[Any]] = [self._ready, self.lost]
        loop = asyncio.get_running_loop()
        while not any(future.done() for future in either):
            await asyncio.wait(either, timeout=self._bounds.watch_interval_s, return_when=asyncio.FIRST_COMPLETED)
            still_s = min((rank.still_s for rank in self._board.read() if rank.pid), default=math.inf)
            if still_s < self._bounds.start_s and not limit.expired():  # ranks wait for each other: one that moves is enough
                limit.reschedule(loop.time() + self._bounds.start_s - still_s)
        if not self._ready.done():
            raise RanksLost(self.lost.result())
        return self._ready.result()

    def _on_message(self, message: RankMessage) -> None:
        """Handles a message of a rank.

        Messages of a lost group are not passed on: its generations have already failed.
        """
        if self.lost.done():
            return
        match message:
            case StepEvents():
                self._on_step(message)
            case RankReady():
                self._answers.append(message)
                if len(self._answers) == self._spec.tp and not self._ready.done():
                    self._ready.set_result(sorted(self._answers, key=lambda answer: answer.rank))
            case RankRefused():
                if not self._ready.done():
                    self._ready.set_exception(RanksRefused(message.message))
            case RankCrashed():
                cause = LossCause.UNSOUND if message.unsound else LossCause.DIED
                self._lose(RankLoss(message.rank, cause, f"rank {message.rank} failed: {message.message}"))
            case ProfileTrace() | PagesAnswer():
                self._pass_on(message)

    def _pass_on(self, message: ProfileTrace | PagesAnswer) -> None:
        if isinstance(message, ProfileTrace):
            self._events.on_trace(message)
        else:
            self._events.on_pages(message)

    def _on_step(self, events: StepEvents) -> None:
        fed = events.stats.prefill_tokens + events.stats.decode_tokens
        if fed > self._fed_tokens:
            self._watchdog.record(events.step_s, fed - self._fed_tokens)
            self._fed_tokens = fed
        self._taken = events.taken
        if self._waiting:
            self._tell_taken()
        self._events.on_step(events)

    def _tell_taken(self) -> None:
        """Wakes who waits for what has been taken, or will not be: the group is lost, or ends."""
        over = self.lost.done()
        for sent, taken in self._waiting:
            if (over or sent <= self._taken) and not taken.done():
                taken.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    def _on_exit(self, rank: int, exited: asyncio.Future[int]) -> None:
        """Reports the loss of a rank that exited, after a delay that depends on the exit code.

        A rank that failed itself may have a last message in flight that says more. A rank that
        ended because of another one waits until that rank's end is seen, so that the blame is
        right.
        """
        code = exited.result()
        if self._lost_to(rank):
            self._log.warning("rank ended", rank=rank, ended=exit_text(code))
        if words := self._processes[rank].crash:
            self._log.error("rank's last words", rank=rank, ended=exit_text(code), stack=words)
        loss = self._died(rank, exit_text(code))
        delay_s = 0.0 if code < 0 else _BLAME_WAIT_S if code == PEER_LOST else _LAST_WORDS_S
        asyncio.get_running_loop().call_later(delay_s, self._lose, loss)

    def _on_dying(self, rank: int, _: object) -> None:
        """Reports the loss of a rank that is being killed before the cause of its death is known.

        A group that is being ended kills its ranks itself, which is no loss.
        """
        if self.lost.done():
            return
        loss = self._died(rank, "was killed")
        asyncio.get_running_loop().call_later(_NAMED_WITHIN_S, self._lose, loss)

    def _lost_to(self, rank: int) -> bool:
        """Returns whether the group was lost to this rank's death before its cause was known."""
        if not self.lost.done() or self.lost.cancelled():
            return False
        loss = self.lost.result()
        return loss.rank == rank and loss.cause is LossCause.DIED

    def _died(self, rank: int, how: str) -> RankLoss:
        words = self._processes[rank].crash
        crash = f": {summary(words)}" if words else ""
        return RankLoss(rank, LossCause.DIED, f"rank {rank} {how}{self._doing(rank)}{crash}", words)

    def _doing(self, rank: int) -> str:
        state = self._board.read()[rank]
        return f" in step {state.step}, {state.doing} (collective {state.collective})" if state.in_step else f", {state.phase}"

    def _on_server_lost(self, lost: asyncio.Future[str]) -> None:
        self._lose(_server_loss(lost.result()))

    def _on_closed(self, rank: int) -> None:
        """Reports a closed channel late.

        Usually the process has ended, which says more and is seen at once.
        """
        loss = RankLoss(rank, LossCause.DIED, f"rank {rank} closed its channel")
        asyncio.get_running_loop().call_later(2 * _BLAME_WAIT_S, self._lose, loss)

    def _lose(self, loss: RankLoss) -> None:
        if not self.lost.done():
            self.lost.set_result(loss)

    def _late(self) -> RankLoss:
        """Returns the loss for a start that took too long.

        It names the first rank that was not even forked, or, of those that are not ready, the one
        that moved least recently.
        """
        if len(self._processes) < self._spec.tp:
            rank = len(self._processes)
            return RankLoss(rank, LossCause.START, f"rank {rank} was not forked within {self._bounds.start_s:g} s")
        answered = {answer.rank for answer in self._answers}
        slow = min((r for r in self._board.read() if r.rank not in answered), key=lambda r: r.progress_s)
        return RankLoss(
            slow.rank,
            LossCause.START,
            f"no rank moved for {self._bounds.start_s:g} s during the start; rank {slow.rank} is in {slow.phase}",
        )

    async def _watch_progress(self) -> None:
        while not self.lost.done():
            await asyncio.sleep(self._bounds.watch_interval_s)
            now, ranks = time.monotonic(), self._board.read()
            owes = self._owes(ranks)
            stall = self._watchdog.observe(now, ranks, pending=owes, stopped=self._stopped)
            if stall is not None:
                self._lose(RankLoss(stall.rank, LossCause.STALLED, str(stall)))
            elif self._checks.due(now, busy=owes or any(rank.in_step for rank in ranks)):
                self.send(CheckRanks(self._checks.number))
            if (slow := self._slowness.observe(now, ranks)) is not None:
                self._on_slow(slow)
            if timings := self._collectives.take():
                self._events.on_collectives(timings)

    def _on_unwatched(self, watch: asyncio.Task[None]) -> None:
        """Reports the group as lost when its watchdog fails: unwatched ranks must not serve on.

        The next group has a watchdog again.
        """
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._log.error("watchdog failed", exc_info=error)
            self._lose(RankLoss(0, LossCause.DIED, f"the watchdog of the ranks failed: {error!r}"))

    def _owes(self, ranks: Sequence[RankProgress]) -> bool:
        """Returns whether the ranks owe tokens or an answer.

        A rank that hangs also owes an answer when everything that ran there was cancelled because
        of it.
        """
        return self._events.pending() or self._taken < self._sent or not self._checks.answered(ranks)

    def _on_slow(self, slow: SlowRank) -> None:
        """Logs a slow rank once; reports it as lost when it stays slow for very long."""
        if self._named_slow != slow.rank:
            self._named_slow = slow.rank
            self._log.warning("rank slow", rank=slow.rank, ratio=round(slow.ratio, 1), slow_s=round(slow.slow_s, 1))
        if self._slowness.is_too_long(slow):
            self._lose(RankLoss(slow.rank, LossCause.SLOW, str(slow)))

    def _stopped(self) -> set[int]:
        return {process.rank for process in self._processes if process.stopped}


def _server_loss(text: str) -> RankLoss:
    """Returns the loss of all ranks; counted as a loss of the first one."""
    return RankLoss(0, LossCause.DIED, f"{text}, and every rank with it")
