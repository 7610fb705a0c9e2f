"""The simulated ranks of one start: who lives, how each ends, and how the others notice."""

from __future__ import annotations

from signal import Signals

from ryzanstein.lab.simulation.ranks.rank import SimulatedRank
from ryzanstein.lab.simulation.ranks.team.profile import RankProfile
from ryzanstein.lab.simulation.ranks.team.timers import Timers
from ryzanstein.worker.ranks.messages import PEER_LOST, RankCrashed

_EXIT_S = 0.002


class TeamMembers:
    """The forked ranks, in order. `bereaved`: a rank or the agent has ended."""

    def __init__(self, profile: RankProfile, timers: Timers) -> None:
        self._profile, self._timers = profile, timers
        self.ranks: list[SimulatedRank] = []
        self.bereaved = False

    def living(self, number: int) -> SimulatedRank | None:
        return next((rank for rank in self.ranks if rank.rank == number and rank.alive), None)

    def crash(self, number: int, message: str, *, unsound: bool = False) -> bool:
        """Makes the rank report what went wrong, then end."""
        rank = self.living(number)
        if rank is not None:
            rank.pipe.send(RankCrashed(rank.rank, message[:1024], unsound))
            self.exit(rank, 1)
        return rank is not None

    def kill_all(self) -> None:
        """Kills all ranks, because their server ended."""
        for rank in self.ranks:
            if rank.alive:
                self.kill(rank, -Signals.SIGKILL)

    def kill(self, rank: SimulatedRank, code: int) -> None:
        """Kills the rank; its end is visible after `takedown_s`."""
        rank.alive = False
        rank.process.dies()
        self._timers.later(self._profile.takedown_s, self._ended, rank, code)

    def exit(self, rank: SimulatedRank, code: int) -> None:
        """Ends the rank by its own decision."""
        rank.alive = False
        self._timers.later(_EXIT_S, self._ended, rank, code)

    def _ended(self, rank: SimulatedRank, code: int) -> None:
        rank.pipe.hang_up()
        rank.release()
        rank.process.ended(code)
        self.bereave()

    def bereave(self) -> None:
        """Marks a rank or the agent as gone; the other ranks notice after `notice_s`."""
        self.bereaved = True
        self.notice_later()

    def notice_later(self) -> None:
        """Ends the ranks that move after `notice_s`, because a peer or the agent is gone."""
        self._timers.later(self._profile.notice_s, self._notice)

    def _notice(self) -> None:
        for rank in self.ranks:
            if rank.moves:
                self.exit(rank, PEER_LOST)
