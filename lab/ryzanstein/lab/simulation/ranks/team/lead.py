"""Rank 0's loop: `ranks.loops.Lead` as callbacks, with the real engine.

A step is computed when it begins and reported when its duration has passed, so that anything in
between happens during the step.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ryzanstein.lab.simulation.ranks.team.members import TeamMembers
from ryzanstein.lab.simulation.ranks.team.parts import TeamParts
from ryzanstein.lab.simulation.ranks.team.recording import RankRecording
from ryzanstein.lab.simulation.ranks.team.steps import RankSteps
from ryzanstein.lab.simulation.scripted.executor import DigestCache, Execution, ScriptedExecutor
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, SetBlockLimit, StepEvents, SubmitGroup
from ryzanstein.worker.engine.outcome import RanksUnsound
from ryzanstein.worker.ranks.loops import engine_settings
from ryzanstein.worker.ranks.messages import AgentMessage, CheckRanks, RankSpec
from ryzanstein.worker.supervision.messages import RankReady, StartProfile

_MIN_STEP_S = 1e-6


class SimulatedLead:
    """What rank 0 does beyond its share of a step.

    It takes the agent's messages, runs the engine, begins steps and sends their events.
    """

    def __init__(
        self,
        spec: RankSpec,
        members: TeamMembers,
        steps: RankSteps,
        recording: RankRecording,
        *,
        parts: TeamParts,
    ) -> None:
        self._spec, self._members, self._steps, self._recording = spec, members, steps, recording
        self._profile, self._model, self._faults, self._rng = parts.profile, parts.model, parts.faults, parts.rng
        self._on_unexpected = parts.on_unexpected
        self._inbox: list[AgentMessage] = []
        self._taken = 0
        self._engine: Engine | None = None
        self._executor: ScriptedExecutor | None = None
        self._executions: deque[Execution] = deque()
        self._events: StepEvents | None = None

    def receive(self, message: AgentMessage) -> None:
        self._inbox.append(message)
        self.advance()

    def make_engine(self, num_blocks: int) -> None:
        """Makes the engine, when rank 0 becomes ready."""
        cache = DigestCache(num_blocks, self._spec.settings.block_size, self._model.broken_id)
        executor = self._executor = ScriptedExecutor(self._model, cache, self._faults.steps, self._duration_s)
        ready = RankReady(0, 0, num_blocks, self._spec.settings.block_size, self._spec.settings.max_sequences, {})
        settings = engine_settings(self._spec, ready)
        self._engine = Engine(settings, executor, time.monotonic, lambda: time.monotonic() + executor.elapsed_s)

    def _duration_s(self, num_prefill: int, num_decodes: int) -> float:
        profile = self._profile
        step_s = profile.step_s + profile.prefill_token_s * num_prefill + profile.row_s * num_decodes
        slowest = self._faults.slowest(self._spec.tp)
        return max(_MIN_STEP_S, step_s * self._faults.speed * slowest * (1 + profile.jitter * self._rng.random()))

    def advance(self) -> None:
        """Advances as far as it can without time passing."""
        while self._lead_is_free():
            if self._executions:
                self._steps.begin(self._executions.popleft())
            elif self._events is not None:
                self._tell()
            elif self._inbox or self._has_work:
                self._think()
            else:
                return

    @property
    def _has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work

    def _lead_is_free(self) -> bool:
        lead = self._members.ranks[0]
        return not self._steps.running and lead.ready and lead.moves and not self._members.bereaved

    def _think(self) -> None:
        """Takes the messages that arrived, and computes the next step."""
        assert self._engine is not None
        assert self._executor is not None
        try:
            for message in self._inbox:
                self._take(self._engine, message)
            self._inbox.clear()
            events = self._engine.step()
        except Exception as error:
            self._failed(error)
            return
        self._executions.extend(self._executor.take())
        self._events = msgspec.structs.replace(events, taken=self._taken)
        if not self._executions and self._engine.has_work:
            self._on_unexpected("the engine has work and runs nothing")
            self._members.crash(0, "the engine has work and runs nothing")

    def _failed(self, error: Exception) -> None:
        """Crashes rank 0, as an unexpected exception crashes a real rank."""
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, RanksUnsound):
            self._on_unexpected(text)
        self._members.crash(0, text, unsound=isinstance(error, RanksUnsound))

    def _take(self, engine: Engine, message: AgentMessage) -> None:
        self._taken += 1
        match message:
            case SubmitGroup():
                engine.submit(message)
            case CancelGroup(group):
                engine.cancel(group)
            case FinishChoice(group, choice):
                engine.finish(group, choice)
            case SetBlockLimit(num_blocks):
                engine.limit_blocks(num_blocks)
            case StartProfile():
                self._recording.start(message)
            case CheckRanks(number):
                for rank in self._members.ranks:
                    rank.ask(number)

    def _tell(self) -> None:
        assert self._events is not None
        self._members.ranks[0].pipe.send(self._events)
        self._events = None
        self._recording.lead_sent()
