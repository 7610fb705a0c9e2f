"""What a simulated node's ranks are like, and what its faults are: plain values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ryzanstein.lab.simulation.scripted_executor import StepFaults


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Durations in virtual seconds.

    A step takes `step_s`, and for each prompt token and each decoded row so much more, times up to 1 + `jitter`. Long steps
    pass a collective every `collective_s`. `num_blocks` is what the ranks report where the settings name none; the context
    that they report is bounded by what the blocks hold. `notice_s` is how long a rank takes to find that a peer has ended,
    `takedown_s` how long the end of a killed one takes to be seen. `profiler_s`: the profiler's first start, and each end.
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
    """How a start that fails ends."""

    CRASH = "crash"
    REFUSED = "refused"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class StartFault:
    """One start of the ranks: `rank` takes `extra_s` longer and then ends so, or, without an end, is ready."""

    rank: int = 0
    extra_s: float = 0.0
    end: StartEnd | None = None
    message: str = "it could not be loaded"


@dataclass(slots=True)
class NodeFaults:
    """What a node's ranks suffer beyond one start: `speed` multiplies every step, `slow` the computing of a rank. `starts`
    are used up one by one; `refused` refuses every model while it is set."""

    steps: StepFaults = field(default_factory=StepFaults)
    speed: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)
    starts: deque[StartFault] = field(default_factory=deque)
    refused: str = ""
