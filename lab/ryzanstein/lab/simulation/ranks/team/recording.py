"""The profiler of simulated ranks: it records steps of some ranks and delivers a trace of each."""

from __future__ import annotations

from collections.abc import Callable

from ryzanstein.lab.simulation.ranks.rank import SimulatedRank
from ryzanstein.lab.simulation.ranks.team.members import TeamMembers
from ryzanstein.lab.simulation.ranks.team.profile import RankProfile
from ryzanstein.lab.simulation.ranks.team.timers import Timers
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile


class RankRecording:
    """The recording in progress, if any.

    A rank does not move while its profiler starts or writes; `on_moved` is called when it moves
    again.
    """

    def __init__(
        self, members: TeamMembers, profile: RankProfile, timers: Timers, on_moved: Callable[[SimulatedRank], None]
    ) -> None:
        self._members, self._profile, self._timers, self._on_moved = members, profile, timers, on_moved
        self._recorded: list[SimulatedRank] = []
        self._number = 0
        self._steps_left = 0

    def start(self, request: StartProfile) -> None:
        """Starts recording between two steps. A recording in progress is dropped."""
        living = [self._members.living(rank) for rank in request.ranks] if request.steps else []
        self._recorded = [rank for rank in living if rank is not None]
        self._number, self._steps_left = request.number, request.steps
        for rank in self._recorded:
            start_s = self._profile.profiler_again_s if rank.profiled else self._profile.profiler_s
            rank.profiled = True
            self._be_busy(rank, start_s, self._stop_being_busy, rank)

    def step_ended(self) -> None:
        """Counts a step. Rank 0 first sends everything else, see `lead_sent`."""
        self._steps_left -= 1
        self._deliver(lead=False)

    def lead_sent(self) -> None:
        """Notes that rank 0 has sent the events of its step."""
        self._deliver(lead=True)

    def _deliver(self, *, lead: bool) -> None:
        """Writes the traces of rank 0, or of the others, once the last step has been recorded."""
        first = self._members.ranks[0]
        done = [rank for rank in self._recorded if (rank is first) is lead] if self._steps_left <= 0 else []
        for rank in done:
            self._recorded.remove(rank)
            self._be_busy(rank, self._profile.profiler_again_s, self._write_trace, rank, self._number)

    def _be_busy(self, rank: SimulatedRank, busy_s: float, then: Callable[..., None], *about: object) -> None:
        rank.profiles(True)
        self._timers.later(busy_s, then, *about)

    def _stop_being_busy(self, rank: SimulatedRank) -> None:
        if rank.alive:
            rank.profiles(False)
            rank.delayed = True
            self._on_moved(rank)

    def _write_trace(self, rank: SimulatedRank, number: int) -> None:
        if rank.alive:
            rank.pipe.send(ProfileTrace(rank.rank, b'{"traceEvents": []}', number))
            self._stop_being_busy(rank)
