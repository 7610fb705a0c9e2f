"""The simulated ranks of one start: how they start, step together, stop and end.

The engine, its messages and the board are real; rank 0's loop is `ranks.loops.Lead` as callbacks. A
step is computed when it begins and reported when its duration has passed, so that anything in
between happens during the step. Ranks that wait for one that does not move wait in a collective, as
the board of real ones shows it.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from signal import Signals

import msgspec

from ryzanstein.lab.simulation.rank_process import SimulatedProcess
from ryzanstein.lab.simulation.rank_profile import NodeFaults, RankProfile, StartEnd, StartFault
from ryzanstein.lab.simulation.rank_wiring import SimulatedWiring
from ryzanstein.lab.simulation.scripted_executor import DigestCache, Execution, ScriptedExecutor
from ryzanstein.lab.simulation.scripted_model import ScriptedModel
from ryzanstein.lab.simulation.simulated_rank import SimulatedRank
from ryzanstein.lab.simulation.timers import Timers
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, StepEvents, SubmitGroup
from ryzanstein.worker.engine.probe import RanksUnsound
from ryzanstein.worker.ranks.board import IDLE
from ryzanstein.worker.ranks.loops import engine_settings
from ryzanstein.worker.ranks.messages import (
    PEER_LOST,
    AgentMessage,
    CheckRanks,
    ProfileTrace,
    RankCrashed,
    RankReady,
    RankRefused,
    RankSpec,
    StartProfile,
    StartRank,
)

_IMPORT_SHARE = 0.3  # of a start's duration
_EXIT_S = 0.002
_MIN_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class Makings:
    """What the ranks of one node are made from, start after start.

    `pids` gives each process id; `on_unexpected` is called with exceptions of the engine that no
    fault caused.
    """

    profile: RankProfile
    model: ScriptedModel
    faults: NodeFaults
    rng: random.Random
    pids: Iterator[int]
    on_unexpected: Callable[[str], None]
    context: Context


class Crew:
    """The ranks of one start.

    They are created with their wiring. The server forks each rank, and the first message starts it.
    """

    def __init__(self, spec: RankSpec, makings: Makings) -> None:
        self._spec, self._profile, self._model = spec, makings.profile, makings.model
        self._faults, self._rng, self._pids = makings.faults, makings.rng, makings.pids
        self._on_unexpected = makings.on_unexpected
        faults, context = makings.faults, makings.context
        self._start_fault = faults.starts.popleft() if faults.starts else StartFault()
        self._timers = Timers(context)
        self.wiring = SimulatedWiring(spec, context)
        self.ranks: list[SimulatedRank] = []
        self._inbox: list[AgentMessage] = []
        self._taken = 0
        self._engine: Engine | None = None
        self._executor: ScriptedExecutor | None = None
        self._executions: deque[Execution] = deque()
        self._events: StepEvents | None = None
        self._current: Execution | None = None
        self._pieces_left = 0
        self._piece_s = 0.0
        self._began_ns = 0
        self._time_is_over = False
        self._recorded: SimulatedRank | None = None
        self._recording = 0
        self._steps_to_record = 0
        self._bereaved = False

    @property
    def over(self) -> bool:
        """Whether every forked rank has ended."""
        return bool(self.ranks) and all(rank.process.exited.done() for rank in self.ranks)

    def fork(self, number: int) -> SimulatedProcess:
        """Forks a rank, which waits for its first message."""
        process = SimulatedProcess(number, next(self._pids), self._profile.resident_bytes, partial(self.signal, number))
        pipe = self.wiring.pipes[number]
        rank = SimulatedRank(process, pipe, self.wiring.board_fd, self._spec.tp)
        pipe.on_message = partial(self._on_message, rank)
        pipe.on_closed = self._bereave
        self.ranks.append(rank)
        return process

    # What happens to ranks.

    def signal(self, number: int, signal: Signals) -> bool:
        """Sends a signal. Returns False if the rank has ended or was never forked."""
        rank = self._living(number)
        if rank is None:
            return False
        match signal:
            case Signals.SIGSTOP:
                rank.process.stopped = rank.delayed = True
            case Signals.SIGCONT:
                rank.process.stopped = False
                self._resume(rank)
            case Signals.SIGTERM if rank.process.stopped:
                rank.term_waits = True
            case _:
                self._killed(rank, -signal)
        return True

    def crash(self, number: int, message: str, *, unsound: bool = False) -> bool:
        """Makes the rank report what went wrong, then end."""
        rank = self._living(number)
        if rank is not None:
            rank.pipe.send(RankCrashed(rank.rank, message[:1024], unsound))
            self._exits(rank, 1)
        return rank is not None

    def hang(self, number: int) -> bool:
        """Keeps the rank from its next collective and the end of its step for good."""
        rank = self._living(number)
        if rank is not None:
            rank.hung = rank.delayed = True
        return rank is not None

    def kill_all(self) -> None:
        """Kills all ranks, because their server ended."""
        for rank in self.ranks:
            if rank.alive:
                self._killed(rank, -Signals.SIGKILL)

    def vanish(self) -> None:
        """Ends all ranks without a message, because their agent was killed. Nobody is notified."""
        self._timers.cancel()
        self.wiring.close()
        for rank in self.ranks:
            rank.alive = False
            rank.pipe.cut()
            rank.release()

    def _living(self, number: int) -> SimulatedRank | None:
        return next((rank for rank in self.ranks if rank.rank == number and rank.alive), None)

    def _killed(self, rank: SimulatedRank, code: int) -> None:
        rank.alive = False
        rank.process.dies()
        self._timers.later(self._profile.takedown_s, self._ended, rank, code)

    def _exits(self, rank: SimulatedRank, code: int) -> None:
        rank.alive = False
        self._timers.later(_EXIT_S, self._ended, rank, code)

    def _ended(self, rank: SimulatedRank, code: int) -> None:
        rank.pipe.hang_up()
        rank.release()
        rank.process.ended(code)
        self._bereave()

    def _bereave(self) -> None:
        """Marks a rank or the agent as gone; the other ranks notice after `notice_s`."""
        self._bereaved = True
        self._timers.later(self._profile.notice_s, self._notice)

    def _notice(self) -> None:
        for rank in self.ranks:
            if rank.moves:
                self._exits(rank, PEER_LOST)

    def _resume(self, rank: SimulatedRank) -> None:
        if rank.term_waits:
            self._killed(rank, -Signals.SIGTERM)
        else:
            self._moved(rank)

    def _moved(self, rank: SimulatedRank) -> None:
        """Continues after the rank stood still."""
        if self._bereaved:
            self._timers.later(self._profile.notice_s, self._notice)
            return
        if rank.due and rank.moves:
            self._become_ready(rank)
        rank.answer()
        self._meet()
        self._advance()

    # Starting.

    def _on_message(self, rank: SimulatedRank, message: AgentMessage) -> None:
        if not rank.alive:
            return
        if isinstance(message, StartRank):
            self._begin_start(rank)
        else:
            self._inbox.append(message)
            self._advance()

    def _begin_start(self, rank: SimulatedRank) -> None:
        fault = self._start_fault
        start_s = self._profile.start_s * (1 + self._profile.jitter * self._rng.random())
        rank.board.enter("import")
        self._timers.later(_IMPORT_SHARE * start_s, self._load, rank)
        end = fault.end if fault.rank == rank.rank else None
        extra_s = fault.extra_s if fault.rank == rank.rank else 0.0
        self._timers.later(start_s + extra_s, self._end_start, rank, StartEnd.REFUSED if self._faults.refused else end)

    def _load(self, rank: SimulatedRank) -> None:
        if rank.moves:
            rank.board.enter("load")

    def _end_start(self, rank: SimulatedRank, end: StartEnd | None) -> None:
        match end:
            case None if rank.moves:
                self._become_ready(rank)
            case None:
                rank.due = True
            case StartEnd.KILLED:
                self.signal(rank.rank, Signals.SIGKILL)
            case StartEnd.CRASH:
                self.crash(rank.rank, self._start_fault.message)
            case StartEnd.REFUSED if rank.alive:
                rank.pipe.send(RankRefused(self._faults.refused or self._start_fault.message))
                self._exits(rank, 0)

    def _become_ready(self, rank: SimulatedRank) -> None:
        spec, profile = self._spec, self._profile
        rank.due, rank.ready = False, True
        num_blocks = spec.num_blocks or profile.num_blocks
        if rank.rank == 0:
            self._make_engine(num_blocks)
        rank.board.enter(IDLE)
        context = min(profile.context_length, num_blocks * spec.block_size)
        warm_up_s = profile.step_s + profile.prefill_token_s * spec.max_tokens_per_step
        phases = {
            "import": _IMPORT_SHARE * profile.start_s,
            "load": (1 - _IMPORT_SHARE) * profile.start_s,
            "warm_up": warm_up_s,
        }
        rank.pipe.send(RankReady(rank.rank, context, num_blocks, spec.block_size, spec.max_sequences, phases))
        self._advance()

    def _make_engine(self, num_blocks: int) -> None:
        cache = DigestCache(num_blocks, self._spec.block_size, self._model.broken_id)
        executor = self._executor = ScriptedExecutor(self._model, cache, self._faults.steps, self._duration_s)
        settings = engine_settings(self._spec, num_blocks)
        self._engine = Engine(settings, executor, time.monotonic, lambda: time.monotonic() + executor.elapsed_s)

    def _duration_s(self, num_prefill: int, num_decodes: int) -> float:
        profile = self._profile
        step_s = profile.step_s + profile.prefill_token_s * num_prefill + profile.row_s * num_decodes
        return max(_MIN_STEP_S, step_s * self._faults.speed * self._slowest * (1 + profile.jitter * self._rng.random()))

    @property
    def _slowest(self) -> float:
        return max([1.0, *(self._faults.slow.get(number, 1.0) for number in range(self._spec.tp))])

    # Rank 0's loop.

    def _advance(self) -> None:
        """Advances as far as it can without time passing."""
        while self._lead_is_free():
            if self._executions:
                self._begin(self._executions.popleft())
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
        lead = self.ranks[0]
        return self._current is None and lead.ready and lead.moves and not self._bereaved

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
            self.crash(0, "the engine has work and runs nothing")

    def _failed(self, error: Exception) -> None:
        """Crashes rank 0, as an unexpected exception crashes a real rank."""
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, RanksUnsound):
            self._on_unexpected(text)
        self.crash(0, text, unsound=isinstance(error, RanksUnsound))

    def _take(self, engine: Engine, message: AgentMessage) -> None:
        self._taken += 1
        match message:
            case SubmitGroup():
                engine.submit(message)
            case CancelGroup(group):
                engine.cancel(group)
            case FinishChoice(group, choice):
                engine.finish(group, choice)
            case StartProfile():
                self._start_recording(message)
            case CheckRanks(number):
                for rank in self.ranks:
                    rank.ask(number)

    def _tell(self) -> None:
        assert self._events is not None
        self.ranks[0].pipe.send(self._events)
        self._events = None
        if self._recorded is self.ranks[0]:
            self._deliver()

    # A step of all ranks.

    def _begin(self, execution: Execution) -> None:
        self._current = execution
        for rank in self.ranks:
            if rank.moves:
                rank.begin_step(execution.step, execution.num_tokens)
        one_piece = self._spec.tp == 1
        self._pieces_left = 1 if one_piece else max(1, math.ceil(execution.duration_s / self._profile.collective_s))
        self._piece_s = execution.duration_s / self._pieces_left
        self._begin_piece()

    def _begin_piece(self) -> None:
        """Begins the piece up to the next collective."""
        self._began_ns = time.monotonic_ns()
        self._timers.step(self._piece_s, self._end_piece)

    def _end_piece(self) -> None:
        self._time_is_over = True
        self._meet()
        self._advance()

    def _meet(self) -> None:
        """Ends a piece when its time is over and all ranks move.

        A rank that moves waits for the others.
        """
        if not self._time_is_over or self._current is None:
            return
        if self._spec.tp > 1:
            self._enter_collective(self._current)
        if not all(rank.moves for rank in self.ranks):
            self._wait_in_collective(self._current)
            return
        self._time_is_over = False
        if self._spec.tp > 1:
            for rank in self.ranks:
                rank.leave()
        self._pieces_left -= 1
        if self._pieces_left:
            self._begin_piece()
        else:
            self._end_step()

    def _enter_collective(self, execution: Execution) -> None:
        slowest = self._slowest
        for rank in self.ranks:
            if rank.moves:
                if not rank.in_step:
                    rank.begin_step(execution.step, execution.num_tokens)
                computed_s = self._piece_s * self._faults.slow.get(rank.rank, 1.0) / slowest
                rank.enter(self._began_ns + int(computed_s * 1e9))

    def _wait_in_collective(self, execution: Execution) -> None:
        if self._spec.tp > 1 and not self._bereaved:
            self._timers.later(self._profile.patience_s, self._lose_patience, execution)

    def _lose_patience(self, execution: Execution) -> None:
        """Ends the ranks if no watchdog has ended them."""
        if self._current is execution and self._time_is_over:
            self._bereave()

    def _end_step(self) -> None:
        assert self._current is not None
        for rank in self.ranks:
            if rank.alive:
                if self._current.failed:
                    rank.board.rejoined()
                rank.end_step()
                rank.answer()
        self._current = None
        self._steps_to_record -= 1
        if self._recorded is not self.ranks[0]:  # rank 0 first sends everything else
            self._deliver()

    # The profiler.

    def _start_recording(self, request: StartProfile) -> None:
        """Starts recording between two steps. A recording in progress is dropped."""
        self._recorded = rank = self._living(request.rank) if request.steps else None
        if rank is not None:
            start_s = self._profile.profiler_again_s if rank.profiled else self._profile.profiler_s
            self._recording, self._steps_to_record, rank.profiled = request.number, request.steps, True
            self._be_busy(rank, start_s, self._stop_being_busy, rank)

    def _deliver(self) -> None:
        """Writes the rank's trace once the last step has been recorded."""
        rank = self._recorded
        if rank is not None and self._steps_to_record <= 0:
            self._recorded = None
            self._be_busy(rank, self._profile.profiler_again_s, self._write_trace, rank, self._recording)

    def _be_busy(self, rank: SimulatedRank, busy_s: float, then: Callable[..., None], *about: object) -> None:
        rank.profiles(True)
        self._timers.later(busy_s, then, *about)

    def _stop_being_busy(self, rank: SimulatedRank) -> None:
        if rank.alive:
            rank.profiles(False)
            rank.delayed = True
            self._moved(rank)

    def _write_trace(self, rank: SimulatedRank, number: int) -> None:
        if rank.alive:
            rank.pipe.send(ProfileTrace(rank.rank, b'{"traceEvents": []}', number))
            self._stop_being_busy(rank)
