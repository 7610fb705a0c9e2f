"""What all ranks of a lost group did: recorded after its requests have failed over, before its processes end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.supervision.group import EngineGroup, RankLoss, RankProgress
from ryzanstein.worker.supervision.stacks import ProcessStacks

AUTOPSY_S = 0.25
"""The longest that an autopsy may take: recovery waits for it."""


@dataclass(frozen=True, slots=True)
class Autopsy:
    """The evidence of a loss. `time` is Unix seconds; `missing` are the ranks that the others waited for.

    `ranks` says of each rank what it did, for people.
    """

    time: float
    loss: RankLoss
    ranks: Sequence[str]
    missing: Sequence[int]
    processes: Sequence[ProcessStacks]

    @property
    def fields(self) -> dict[str, Any]:
        """Returns it as the fields of one log record. The innermost functions stand for the stacks."""
        return {
            "rank": self.loss.rank,
            "cause": self.loss.cause.value,
            "missing": list(self.missing),
            "ranks": {f"rank_{rank}": text for rank, text in enumerate(self.ranks)},
            "threads": {process.name.replace(" ", "_"): _threads(process) for process in self.processes},
        }


async def examine(group: EngineGroup, loss: RankLoss) -> Autopsy:
    """Returns the evidence of a group that was lost and has not been ended."""
    ranks = list(group.progress())
    return Autopsy(time.time(), loss, [doing(rank) for rank in ranks], missing(ranks), await group.stacks(0.0))


def missing(ranks: Sequence[RankProgress]) -> tuple[int, ...]:
    """Returns the ranks that are behind the others in the running step; empty if all are at the same place."""
    furthest = max(((rank.step, rank.collective) for rank in ranks if rank.in_step), default=(0, 0))
    return tuple(rank.rank for rank in ranks if (rank.step, rank.collective) < furthest)


def doing(rank: RankProgress) -> str:
    """Returns what a rank does, for people."""
    if not rank.in_step:
        return f"{rank.phase} after step {rank.step}"
    return f"step {rank.step}, {rank.doing}, collective {rank.collective}, still for {rank.still_s:.1f} s"


def _threads(process: ProcessStacks) -> list[str]:
    """Returns the threads that say where they are; of the others, that they are there."""
    told = [f"{each.name} {each.state}: {each.where or each.waits_in}" for each in process.threads if each.stack]
    silent = [each for each in process.threads if not each.stack]
    states = "".join(sorted({each.state for each in silent}))
    return told + ([f"{len(silent)} more threads: {states}"] if silent else [])
