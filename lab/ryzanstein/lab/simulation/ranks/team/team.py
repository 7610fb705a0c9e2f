"""The simulated ranks of one start: how they start, what strikes them, and what makes them go on.

The engine, its messages and the board are real. The ranks' steps are in `rank_steps`, rank 0's loop
is in `rank_lead`, the ranks' ends are in `crew_members`.
"""

from __future__ import annotations

from functools import partial
from signal import Signals

from ryzanstein.lab.simulation.ranks.process import SimulatedProcess
from ryzanstein.lab.simulation.ranks.rank import SimulatedRank
from ryzanstein.lab.simulation.ranks.team.lead import SimulatedLead
from ryzanstein.lab.simulation.ranks.team.members import TeamMembers
from ryzanstein.lab.simulation.ranks.team.parts import TeamParts
from ryzanstein.lab.simulation.ranks.team.profile import StartEnd, StartFault
from ryzanstein.lab.simulation.ranks.team.recording import RankRecording
from ryzanstein.lab.simulation.ranks.team.steps import RankSteps
from ryzanstein.lab.simulation.ranks.team.timers import Timers
from ryzanstein.lab.simulation.ranks.wiring import SimulatedWiring
from ryzanstein.worker.ranks.messages import AgentMessage, RankRefused, RankSpec, StartRank
from ryzanstein.worker.supervision.group import IDLE
from ryzanstein.worker.supervision.messages import RankReady

_IMPORT_SHARE = 0.3  # of a start's duration


class RankTeam:
    """The ranks of one start.

    They are created with their wiring. The server forks each rank, and the first message starts it.
    """

    def __init__(self, spec: RankSpec, parts: TeamParts) -> None:
        self._spec, self._profile, self._faults = spec, parts.profile, parts.faults
        self._rng, self._pids = parts.rng, parts.pids
        faults, context = parts.faults, parts.context
        self._start_fault = faults.starts.popleft() if faults.starts else StartFault()
        timers = self._timers = Timers(context)
        self.wiring = SimulatedWiring(spec, context)
        members = self._members = TeamMembers(parts.profile, timers)
        recording = RankRecording(members, parts.profile, timers, self._moved)
        self._steps = RankSteps(
            members,
            spec.tp,
            parts.profile,
            faults,
            timers,
            on_end=recording.step_ended,
            advance=self._advance,
        )
        self._lead = SimulatedLead(spec, members, self._steps, recording, parts=parts)

    @property
    def ranks(self) -> list[SimulatedRank]:
        return self._members.ranks

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
        pipe.on_closed = self._members.bereave
        self.ranks.append(rank)
        return process

    # What happens to ranks.

    def signal(self, number: int, signal: Signals) -> bool:
        """Sends a signal. Returns False if the rank has ended or was never forked."""
        rank = self._members.living(number)
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
                self._members.kill(rank, -signal)
        return True

    def crash(self, number: int, message: str, *, unsound: bool = False) -> bool:
        """Makes the rank report what went wrong, then end."""
        return self._members.crash(number, message, unsound=unsound)

    def hang(self, number: int) -> bool:
        """Keeps the rank from its next collective and the end of its step for good."""
        rank = self._members.living(number)
        if rank is not None:
            rank.hung = rank.delayed = True
        return rank is not None

    def kill_all(self) -> None:
        """Kills all ranks, because their server ended."""
        self._members.kill_all()

    def vanish(self) -> None:
        """Ends all ranks without a message, because their agent was killed. Nobody is notified."""
        self._timers.cancel()
        self.wiring.close()
        for rank in self.ranks:
            rank.alive = False
            rank.pipe.cut()
            rank.release()

    def _resume(self, rank: SimulatedRank) -> None:
        if rank.term_waits:
            self._members.kill(rank, -Signals.SIGTERM)
        else:
            self._moved(rank)

    def _moved(self, rank: SimulatedRank) -> None:
        """Continues after the rank stood still."""
        if self._members.bereaved:
            self._members.notice_later()
            return
        if rank.due and rank.moves:
            self._become_ready(rank)
        rank.answer()
        self._steps.meet()
        self._advance()

    # Starting.

    def _on_message(self, rank: SimulatedRank, message: AgentMessage) -> None:
        if not rank.alive:
            return
        if isinstance(message, StartRank):
            self._begin_start(rank)
        else:
            self._lead.receive(message)

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
                self._members.exit(rank, 0)

    def _become_ready(self, rank: SimulatedRank) -> None:
        spec, profile = self._spec, self._profile
        rank.due, rank.ready = False, True
        num_blocks = spec.settings.num_blocks or profile.num_blocks
        if rank.rank == 0:
            self._lead.make_engine(num_blocks)
        rank.board.enter(IDLE)
        context = min(profile.context_length, num_blocks * spec.settings.block_size)
        warm_up_s = profile.step_s + profile.prefill_token_s * spec.settings.max_tokens_per_step
        phases = {
            "import": _IMPORT_SHARE * profile.start_s,
            "load": (1 - _IMPORT_SHARE) * profile.start_s,
            "warm_up": warm_up_s,
        }
        rank.pipe.send(RankReady(rank.rank, context, num_blocks, spec.settings.block_size, spec.settings.max_sequences, phases))
        self._advance()

    def _advance(self) -> None:
        self._lead.advance()
