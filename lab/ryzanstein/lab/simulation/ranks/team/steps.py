"""The step that the simulated ranks compute together.

It consists of pieces: at the end of each, the ranks meet in a collective. Ranks that wait for one
that does not move wait in the collective, as the board of real ones shows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ryzanstein.lab.simulation.ranks.team.members import TeamMembers
from ryzanstein.lab.simulation.ranks.team.profile import NodeFaults, RankProfile
from ryzanstein.lab.simulation.ranks.team.timers import Timers
from ryzanstein.lab.simulation.scripted.executor import Execution


class RankSteps:
    """The steps of all ranks, one after the other.

    `on_end` is called at the end of each step, `advance` whenever time has passed in one.
    """

    def __init__(
        self,
        members: TeamMembers,
        tp: int,
        profile: RankProfile,
        faults: NodeFaults,
        timers: Timers,
        *,
        on_end: Callable[[], None],
        advance: Callable[[], None],
    ) -> None:
        self._members, self._tp = members, tp
        self._profile, self._faults, self._timers = profile, faults, timers
        self._on_end, self._advance = on_end, advance
        self._current: Execution | None = None
        self._pieces_left = 0
        self._piece_s = 0.0
        self._began_ns = 0
        self._time_is_over = False

    @property
    def running(self) -> bool:
        return self._current is not None

    def begin(self, execution: Execution) -> None:
        self._current = execution
        for rank in self._members.ranks:
            if rank.moves:
                rank.begin_step(execution.step, execution.num_tokens)
        one_piece = self._tp == 1
        self._pieces_left = 1 if one_piece else max(1, math.ceil(execution.duration_s / self._profile.collective_s))
        self._piece_s = execution.duration_s / self._pieces_left
        self._begin_piece()

    def _begin_piece(self) -> None:
        """Begins the piece up to the next collective."""
        self._began_ns = time.monotonic_ns()
        self._timers.step(self._piece_s, self._end_piece)

    def _end_piece(self) -> None:
        self._time_is_over = True
        self.meet()
        self._advance()

    def meet(self) -> None:
        """Ends a piece when its time is over and all ranks move.

        A rank that moves waits for the others.
        """
        if not self._time_is_over or self._current is None:
            return
        if self._tp > 1:
            self._enter_collective(self._current)
        if not all(rank.moves for rank in self._members.ranks):
            self._wait_in_collective(self._current)
            return
        self._time_is_over = False
        if self._tp > 1:
            for rank in self._members.ranks:
                rank.leave()
        self._pieces_left -= 1
        if self._pieces_left:
            self._begin_piece()
        else:
            self._end_step()

    def _enter_collective(self, execution: Execution) -> None:
        slowest = self._faults.slowest(self._tp)
        for rank in self._members.ranks:
            if rank.moves:
                if not rank.in_step:
                    rank.begin_step(execution.step, execution.num_tokens)
                computed_s = self._piece_s * self._faults.slow.get(rank.rank, 1.0) / slowest
                rank.enter(self._began_ns + int(computed_s * 1e9))

    def _wait_in_collective(self, execution: Execution) -> None:
        if self._tp > 1 and not self._members.bereaved:
            self._timers.later(self._profile.patience_s, self._lose_patience, execution)

    def _lose_patience(self, execution: Execution) -> None:
        """Ends the ranks if no watchdog has ended them."""
        if self._current is execution and self._time_is_over:
            self._members.bereave()

    def _end_step(self) -> None:
        assert self._current is not None
        for rank in self._members.ranks:
            if rank.alive:
                if self._current.failed:
                    rank.board.rejoined()
                rank.end_step()
                rank.answer()
        self._current = None
        self._on_end()
