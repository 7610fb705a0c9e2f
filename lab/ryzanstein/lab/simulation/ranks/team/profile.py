"""The properties of a simulated node's ranks and its faults: plain values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ryzanstein.lab.simulation.scripted.executor import StepFaults


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Durations in virtual seconds, and the ranks' capacity.

    A step takes `step_s`, plus `prefill_token_s` for each prompt token and `row_s` for each decoded
    token, times up to 1 + `jitter`. Long steps reach a collective every `collective_s`.
    `num_blocks` is what the ranks report if the settings name none; the context that they report is
    bounded by what the blocks hold. `notice_s` is how long a rank takes to notice that a peer
    ended, `takedown_s` how long until the end of a killed one is visible. `profiler_s` is the
    profiler's first start, `profiler_again_s` each later start and each end.
    """

    context_length: int = 131072
    num_blocks: int = 16384
    step_s: float = 0.02
    prefill_token_s: float = 0.0002
    row_s: float = 0.001
    jitter: float = 0.1
    collective_s: float = 0.25
    start_s: float = 2.0
    server_s: float = 1.5
    fork_s: float = 0.003
    notice_s: float = 0.01
    takedown_s: float = 0.03
    patience_s: float = 600.0
    profiler_s: float = 3.0
    profiler_again_s: float = 0.05
    resident_bytes: int = 2**30


class StartEnd(Enum):
    """How a failed start ends."""

    CRASH = "crash"
    REFUSED = "refused"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class StartFault:
    """A fault of one start of the ranks.

    `rank` takes `extra_s` longer and then ends as `end` says, or becomes ready without an `end`.
    """

    rank: int = 0
    extra_s: float = 0.0
    end: StartEnd | None = None
    message: str = "it could not be loaded"


@dataclass(slots=True)
class NodeFaults:
    """A node's faults beyond one start.

    `speed` multiplies every step, `slow` the computing time of a rank.

    `starts` are used up one by one; `refused` refuses every model while it is set.
    """

    steps: StepFaults = field(default_factory=StepFaults)
    speed: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)
    starts: deque[StartFault] = field(default_factory=deque)
    refused: str = ""

    def slowest(self, size: int) -> float:
        """Returns by how much the slowest of `size` ranks multiplies a step's computing time."""
        return max([1.0, *(self.slow.get(number, 1.0) for number in range(size))])
