"""Who leads the orchestrators, as their peers know it.

Each leader has a higher epoch than those before. A peer that has met one follows no earlier one, so a
leader that was stopped and runs again can do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LeaderEpoch:
    """A leader. The epoch 0 is of an older orchestrator, which does not say it."""

    epoch: int = 0
    leader_id: str = ""

    def is_stale_after(self, known: LeaderEpoch) -> bool:
        """Returns whether one who knows the other may not follow this one. Of two with one epoch the first counts."""
        if not self.epoch:
            return False
        return self.epoch < known.epoch or (self.epoch == known.epoch and self.leader_id != known.leader_id)


class StaleLeaderError(Exception):
    """An orchestrator does not lead any more, and does not know it yet."""


class KnownLeader:
    """The latest leader that a peer has met."""

    def __init__(self) -> None:
        self.latest = LeaderEpoch()

    def follow(self, leader: LeaderEpoch) -> None:
        """Records who says something. Raises StaleLeaderError when it may not be followed.

        An older orchestrator is followed.
        """
        if leader.is_stale_after(self.latest):
            raise StaleLeaderError(f"epoch {leader.epoch} of {leader.leader_id} after {self.latest.epoch}")
        self.latest = max(self.latest, leader)
