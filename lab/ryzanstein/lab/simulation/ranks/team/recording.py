"""The profiler of simulated ranks: it records steps of one rank and delivers a trace."""

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
        self._recorded: SimulatedRank | None = None
        self._number = 0
        self._steps_left = 0

    def start(self, request: StartProfile) -> None:
        """Starts recording between two steps. A recording in progress is dropped."""
        self._recorded = rank = self._members.living(request.rank) if request.steps else None
        if rank is not None:
            start_s = self._profile.profiler_again_s if rank.profiled else self._profile.profiler_s
            self._number, self._steps_left, rank.profiled = request.number, request.steps, True
            self._be_busy(rank, start_s, self._stop_being_busy, rank)

    def step_ended(self) -> None:
        """Counts a step. Rank 0 first sends everything else, see `lead_sent`."""
        self._steps_left -= 1
        if self._recorded is not self._members.ranks[0]:
            self._deliver()

    def lead_sent(self) -> None:
        """Notes that rank 0 has sent the events of its step."""
        if self._recorded is self._members.ranks[0]:
            self._deliver()

    def _deliver(self) -> None:
        """Writes the rank's trace once the last step has been recorded."""
        rank = self._recorded
        if rank is not None and self._steps_left <= 0:
            self._recorded = None
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
