"""The loops of ready ranks: rank 0 leads, the others follow.

Rank 0 takes commands, steps the engine and sends the plan to the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Never

import msgspec

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.collectives import PeerGaveUp
from ryzanstein.worker.constraints.cache import Grammars
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import (
    CancelGroup,
    DropAdapter,
    ExportPages,
    FindPages,
    FinishChoice,
    ImportPages,
    MapAdapter,
    ReturnChoice,
    SetBlockLimit,
    SetTokens,
    StepEvents,
    SubmitGroup,
)
from ryzanstein.worker.engine.plan import OutOfMemory, PageMove, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.ranks.channel import RankChannel, encode
from ryzanstein.worker.ranks.constrained import ConstrainedGroups
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.health.recorder import StepRecorder
from ryzanstein.worker.ranks.messages import AgentMessage, CheckRanks, RankCommand, RankSpec
from ryzanstein.worker.ranks.slab import RankSlab
from ryzanstein.worker.supervision.group import IDLE, TOKENS
from ryzanstein.worker.supervision.messages import GroupChange, PageRequest, RankReady, StartProfile

if TYPE_CHECKING:
    from ryzanstein.worker.model.runner import ModelRunner


GRAMMAR_WAIT_S = 0.002  # how often rank 0 looks for a compiled grammar when it has nothing else to do
MASK_WAIT_S = 0.005  # ... and for a mask that is computed beside the steps
STARVED_WAIT_S = 0.02  # how long rank 0 sleeps when no sequence fits its blocks; deadlines pass meanwhile


class RankExecutor:
    """Runs a step on every rank; the engine's `Executor`."""

    def __init__(
        self,
        runner: ModelRunner,
        board: RankBoard,
        peers: Sequence[RankChannel[RankCommand]],
        recorder: StepRecorder,
        slab: RankSlab,
        *,
        masks: StepMasks,
    ) -> None:
        self._runner, self.board, self._peers, self._recorder = runner, board, peers, recorder
        self.slab, self._masks = slab, masks
        self._epoch = 0

    def profile(self, request: StartProfile) -> None:
        """Makes a rank record from the next step on.

        Its profiler starts now: inside a step all other ranks would wait for it.
        """
        self._tell(RankCommand(None, request, self._epoch))
        self._recorder.start(request)

    def deliver_profile(self) -> None:
        """Delivers a finished profile.

        Call it after everything else was sent: writing one takes long.
        """
        self._recorder.deliver()

    def check(self, number: int) -> None:
        """Answers a check, and sends it to the other ranks."""
        self.board.answer(number)
        self._tell(RankCommand(None, None, self._epoch, number))

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Sequence[SampledToken]:
        """Runs a step. ChannelClosed, CollectiveTimeout or CannotRejoin: the group is lost."""
        self.board.begin_step(plan.step, len(plan.token_ids))
        self._tell(RankCommand(plan, epoch=self._epoch))
        masks = self._masks if any(row.constraint is not None for row in rows) else None
        if masks is not None:
            masks.begin(rows)
        try:
            return self._runner.execute(plan, rows, masks)
        except (OutOfMemory, PeerGaveUp) as error:
            shortage = str(error)
            self._give_up()
        finally:
            self.board.end_step()
            self._recorder.stepped()
        raise OutOfMemory(shortage)

    def rearrange(self, change: Rearrangement) -> None:
        """Changes the KV cache of every rank, before its next step."""
        self._tell(RankCommand(None, None, self._epoch, change=change))
        self._runner.rearrange(change)

    def move_pages(self, move: PageMove) -> None:
        """Copies pages between the slab and the cache of every rank, before its next step."""
        self._tell(RankCommand(None, None, self._epoch, pages=move))
        self.slab.move(move)

    def adapt(self, change: MapAdapter | DropAdapter) -> None:
        """Makes every rank keep or forget an adapter, before its next step."""
        self._tell(RankCommand(None, None, self._epoch, adapter=change))
        take_adapter(self._runner, change)

    def starved(self) -> None:
        """Shows that rank 0 waits for blocks and does not hang."""
        self.board.enter(IDLE)

    @contextmanager
    def standing_still(self, phase: str) -> Iterator[None]:
        """Shows one of the `STANDSTILLS`."""
        self.board.enter(phase)
        try:
            yield
        finally:
            self.board.enter(IDLE)

    def _give_up(self) -> None:
        """Gives up the step on all ranks.

        The others may be in the step, or have done their part of it and wait for the next command.
        """
        self._epoch += 1
        self._tell(RankCommand(None, None, self._epoch))
        self._runner.rejoin()

    def _tell(self, command: RankCommand) -> None:
        if self._peers:
            frame = encode(command)
            for peer in self._peers:
                peer.send_frame(frame)


class Lead:
    """The loop of rank 0."""

    def __init__(
        self, agent: RankChannel[AgentMessage], engine: Engine, executor: RankExecutor, constrained: ConstrainedGroups
    ) -> None:
        self._agent, self._engine, self._executor, self._constrained = agent, engine, executor, constrained
        self._taken = 0

    def run(self) -> Never:
        """Runs until the agent or another rank is gone; raises the error that shows it.

        Sleeps while there is no work.
        """
        while True:
            messages = self._messages()
            self._executor.board.waited()
            for message in messages:
                self._take(message)
            self._submit_prepared()
            # Also without work: a cancelled group's blocks are free now, and the agent should know.
            self._agent.send(self._completed(self._engine.step()))
            self._executor.board.reported()
            self._executor.deliver_profile()

    def _messages(self) -> list[AgentMessage]:
        if not self._engine.has_work:
            return self._wait_for_grammars() if self._constrained.waiting else self._agent.wait()
        if not self._engine.starves:
            return self._agent.drain()
        self._executor.starved()
        computes_ahead = self._constrained.used and self._constrained.computes_ahead
        return self._agent.wait_for(MASK_WAIT_S if computes_ahead else STARVED_WAIT_S)

    def _wait_for_grammars(self) -> list[AgentMessage]:
        self._executor.starved()
        return self._agent.wait_for(GRAMMAR_WAIT_S)

    def _submit_prepared(self) -> None:
        if not self._constrained.waiting:
            return
        for message, prepared in self._constrained.ready():
            if isinstance(prepared, RyzansteinError):
                self._engine.refuse(message, prepared)
            else:
                self._engine.submit(message, prepared)

    def _completed(self, events: StepEvents) -> StepEvents:
        stats = events.stats
        if self._constrained.used:
            stats = msgspec.structs.replace(stats, constraints=self._constrained.stats())
        return msgspec.structs.replace(events, taken=self._taken, stats=stats)

    def _take(self, message: AgentMessage) -> None:
        self._taken += 1
        match message:
            case SubmitGroup() | CancelGroup() | FinishChoice() | ReturnChoice():
                self._change(message)
            case SetTokens(table):
                # llguidance does not release the interpreter meanwhile, so nothing else could run.
                with self._executor.standing_still(TOKENS):
                    self._constrained.know(table)
            case SetBlockLimit(num_blocks):
                self._engine.limit_blocks(num_blocks)
            case MapAdapter() | DropAdapter():
                self._executor.adapt(message)
            case StartProfile():
                self._executor.profile(message)
            case CheckRanks(number):
                self._executor.check(number)
            case FindPages() | ExportPages() | ImportPages():
                self._executor.slab.answer(message.number, self._pages(message))

    def _change(self, message: GroupChange) -> None:
        match message:
            case SubmitGroup():
                self._submit(message)
            case CancelGroup(group):
                self._cancel(group)
            case FinishChoice(group, choice):
                self._engine.finish(group, choice)
            case ReturnChoice(group, choice):
                self._engine.returned(group, choice)

    def _submit(self, message: SubmitGroup) -> None:
        if message.sampling.constraint is not None:
            self._constrained.take(message)
        else:
            self._engine.submit(message)

    def _cancel(self, group: int) -> None:
        if self._constrained.waiting:
            self._constrained.cancel(group)
        self._engine.cancel(group)

    def _pages(self, request: PageRequest) -> list[int]:
        match request:
            case FindPages(_, names):
                return self._engine.find_pages(names)
            case ExportPages(number, names):
                return self._engine.export_pages(number, names)
            case ImportPages(number, names, parent):
                return self._engine.import_pages(number, names, parent)


class Follower:
    """The loop of the other ranks."""

    def __init__(self, runner: ModelRunner, board: RankBoard, recorder: StepRecorder, slab: RankSlab) -> None:
        self._runner, self._board, self._recorder, self._slab = runner, board, recorder, slab
        self._epoch = 0

    def run(self, lead: RankChannel[RankCommand]) -> Never:
        """Runs until rank 0 is gone; raises the error that shows it."""
        while True:
            for command in lead.wait():
                self._obey(command)

    def _obey(self, command: RankCommand) -> None:
        if command.check:
            self._board.answer(command.check)
        elif command.profile is not None:
            self._recorder.start(command.profile)
        elif command.change is not None:
            self._runner.rearrange(command.change)
        elif command.adapter is not None:
            take_adapter(self._runner, command.adapter)
        elif command.pages is not None:
            self._slab.move(command.pages)
            self._slab.answer(command.pages.number, [])
        elif command.epoch > self._epoch:
            self._give_up()
        elif command.plan is not None and command.epoch == self._epoch:
            self._execute(command.plan)

    def _execute(self, plan: StepPlan) -> None:
        self._board.begin_step(plan.step, len(plan.token_ids))
        try:
            self._runner.execute(plan, [])
        except (OutOfMemory, PeerGaveUp):
            self._give_up()
        self._board.end_step()
        self._recorder.stepped()
        self._recorder.deliver()

    def _give_up(self) -> None:
        """Leaves the step, so that no rank waits for this one in vain.

        Rank 0 decides what is tried next.
        """
        self._epoch += 1
        self._runner.rejoin()


def take_adapter(runner: ModelRunner, change: MapAdapter | DropAdapter) -> None:
    """Keeps or forgets an adapter on one rank."""
    if isinstance(change, MapAdapter):
        runner.map_adapter(change.slot, Path(change.path))
    else:
        runner.drop_adapter(change.slot)


def engine_settings(spec: RankSpec, ready: RankReady) -> EngineSettings:
    """Returns the settings of the engine of a rank that is ready."""
    return EngineSettings(
        num_blocks=ready.num_blocks,
        block_size=spec.settings.block_size,
        max_sequences=ready.max_sequences,
        token_budget=spec.settings.max_tokens_per_step,
        queue=spec.queue,
        borrowable_blocks=max(0, ready.max_blocks - ready.num_blocks),
        windows=ready.windows,
        hot_tokens=ready.hot_tokens,
        hot_pages=ready.hot_pages,
        lasting=ready.lasting,
        num_states=ready.num_states,
    )


def new_masks(spec: RankSpec, vocab_size: int) -> StepMasks:
    """Returns the masks of rank 0. They share its cores with the step that they are computed beside."""
    return StepMasks(vocab_size, max(1, min(spec.threads, 4)))


def new_constrained(spec: RankSpec, masks: StepMasks, board: RankBoard) -> ConstrainedGroups:
    """Returns the constrained groups of rank 0, with an empty cache of grammars."""
    return ConstrainedGroups(Grammars(spec.grammar_cache_bytes), masks, board.move)
