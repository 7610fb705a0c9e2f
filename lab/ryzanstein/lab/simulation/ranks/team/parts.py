"""What the simulated ranks of one node are made from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass

from ryzanstein.lab.simulation.ranks.team.profile import NodeFaults, RankProfile
from ryzanstein.lab.simulation.scripted.model import ScriptedModel


@dataclass(frozen=True, slots=True)
class TeamParts:
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
