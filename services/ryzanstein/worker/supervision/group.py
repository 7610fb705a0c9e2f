"""The seam between the agent and whatever runs a model: an engine group, and a factory of them.

An engine group is the ranks of one model as one unit: started together, lost together. The agent
knows no other interface to a model that runs. `ranks.group.RankGroup` is the native one.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.supervision.messages import EngineMessage, PagesAnswer, ProfileTrace, RankReady
from ryzanstein.worker.supervision.stacks import ProcessStacks

IDLE, FORWARD, PROFILE, TOKENS, PREFILL = "idle", "forward", "profile", "tokens", "prefill"
COMPILE, LOAD, PACK = "compile", "load", "pack"
STARTING = ("", COMPILE, "start", "import", "group", LOAD, PACK, "warm_up")
"""The phases of a rank that starts, in order. Its process is not there yet in the first one, and while kernels are compiled."""
STANDSTILLS = frozenset({PROFILE, TOKENS, PREFILL})
"""The phases of a rank in which no step moves and nothing is wrong: a profiler starts or writes, the
bytes of the model's tokens are read for the first constraint, or an engine that is not ours computes
prompts alone. They are bounded, see `StallBounds`; the last by the engine's own pace.
"""


class LossCause(Enum):
    """The cause of a loss of ranks, spelled as in `ErrorInfo.reason`."""

    DIED = "RANK_LOST"
    STALLED = "RANK_STALLED"
    START = "RANK_START_TIMEOUT"
    UNSOUND = "RANKS_UNSOUND"
    SLOW = "RANK_SLOW"


@dataclass(frozen=True, slots=True)
class RankLoss:
    """A loss: the rank, the cause, and a message for people that names the rank and what it did.

    `last_words` has the stacks that the rank wrote when it crashed; empty if it did not.
    """

    rank: int
    cause: LossCause
    message: str
    last_words: str = ""


class RanksLost(Exception):
    """The group was lost while it started."""

    def __init__(self, loss: RankLoss) -> None:
        super().__init__(loss.message)
        self.loss = loss


class RanksRefused(Exception):
    """A rank cannot serve the model; retrying does not help."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The slot of one rank.

    Times are seconds on the monotonic clock, which all processes of a machine share. `step` counts
    steps begun, `collective` collectives entered. `begun_s` is when the running step began, 0
    between steps; `num_tokens` is how many tokens it feeds. `collectives_s` is the time that the
    rank has spent in collectives so far, including waits for its peers; a collective that only
    queues work on a device counts for as long as queueing takes. `compute_s` is the rest of all
    steps up to their last collective: what ranks do alike, excluding sampling on rank 0. `answered`
    is the number of the agent's last check of idle ranks that it has answered. `tail_s` is
    the time of all steps after their last collective: sampling on rank 0. The times after it are those
    between steps: rank 0 schedules a step, updates the sequences and reports, or has no work; the
    other ranks wait for it. `loaded_bytes` of `load_bytes` are read of the weights, while the rank loads them;
    `packed_bytes` of the `pack_bytes` that were read are packed for the processor. `place` is what a step in C computes,
    such as "layer 7, down".
    """

    rank: int
    pid: int
    step: int
    collective: int
    phase: str
    progress_s: float
    begun_s: float
    num_tokens: int
    last_step_s: float
    collectives_s: float = 0.0
    compute_s: float = 0.0
    answered: int = 0
    tail_s: float = 0.0
    schedule_s: float = 0.0
    update_s: float = 0.0
    idle_s: float = 0.0
    loaded_bytes: int = 0
    load_bytes: int = 0
    packed_bytes: int = 0
    pack_bytes: int = 0
    place: str = ""

    @property
    def doing(self) -> str:
        """Returns its phase, and what it computes in it."""
        return f"{self.phase}, {self.place}" if self.place else self.phase

    @property
    def in_step(self) -> bool:
        return self.begun_s > 0

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Returns what its time was spent on so far. A rank alone has no collectives, and its steps no tail."""
        alone = not self.collectives_s
        return {
            "compute": self.compute_s + self.tail_s if alone else self.compute_s,
            "collective": self.collectives_s,
            "tail": 0.0 if alone else self.tail_s,
            "schedule": self.schedule_s,
            "update": self.update_s,
            "idle": self.idle_s,
        }

    @property
    def still_s(self) -> float:
        """Returns the seconds since it last moved."""
        return time.monotonic() - self.progress_s


@dataclass(frozen=True, slots=True)
class RankWait:
    """A rank's stay in one collective, from `began_s` in monotonic seconds. `last` is who came last, if that is known."""

    op: str
    number: int
    began_s: float
    took_s: float
    last: int | None


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank did in one step that is over: see `RankProgress` for its times. `longest`: where it waited longest."""

    rank: int
    begun_s: float
    num_tokens: int
    compute_s: float
    collective_s: float
    tail_s: float
    longest: RankWait | None = None

    @property
    def ended_s(self) -> float:
        return self.begun_s + self.compute_s + self.collective_s + self.tail_s


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """What one collective of a group was spent on.

    `skew_s` is how long the first rank waited for the last one, `transfer_s` how long the collective
    took from then on. `last` is the rank that came last; None: all came at once.
    """

    op: str
    skew_s: float
    transfer_s: float
    last: int | None


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """The callbacks of a group: each step's events, requested traces, whether work is pending,
    answers about pages, and a sample of its collectives.

    Called in the loop; they must not block.
    """

    on_step: Callable[[StepEvents], None]
    on_trace: Callable[[ProfileTrace], None]
    pending: Callable[[], bool]
    on_pages: Callable[[PagesAnswer], None] = lambda _: None
    on_collectives: Callable[[Sequence[CollectiveTiming]], None] = lambda _: None


class EngineGroup(Protocol):
    """The ranks of one model, used once: `start`, `send`, `lost`, `end`."""

    lost: asyncio.Future[RankLoss]
    """Resolves to the first loss, also during the start."""

    async def start(self) -> Sequence[RankReady]:
        """Starts all ranks; returns what each reported when it was ready, by rank.

        Raises RanksLost or RanksRefused. After an error or a cancellation, call `end`.
        """
        ...

    def send(self, message: EngineMessage) -> None:
        """Sends a message to the engine. Never waits."""
        ...

    async def obeyed(self) -> None:
        """Returns when all ranks have done what they were sent before, or are lost; a step may have to end first."""
        ...

    def slab(self, size_bytes: int) -> mmap.mmap:
        """Returns memory of at least so many bytes that is shared with the ranks: pages pass through it.

        Call it once. Raises OSError when there is not enough memory.
        """
        ...

    def progress(self) -> Sequence[RankProgress]:
        """Returns what each rank does now, by rank."""
        ...

    def steps(self, step: int) -> Sequence[RankStep]:
        """Returns what each rank did in a step, one of the last 64; empty where that is not recorded."""
        ...

    def slowness(self) -> Mapping[int, float]:
        """Returns how long each rank computes, relative to the median of the others.

        Empty until that is known, or with one rank.
        """
        ...

    def resident_bytes(self) -> Sequence[int]:
        """Returns the resident memory of each rank."""
        ...

    def private_bytes(self) -> Sequence[int]:
        """Returns the memory of each rank that is not backed by files."""
        ...

    async def stacks(self, watched_s: float) -> Sequence[ProcessStacks]:
        """Returns where the threads of its processes are, and what they computed within `watched_s`.

        By rank. Also of a group that was lost and not ended; empty for processes of another machine.
        """
        ...

    async def end(self, *, graceful: bool) -> None:
        """Ends all ranks; returns when their memory is free. Without grace they are killed."""
        ...


class EngineFactory(Protocol):
    """Makes the engine groups of one model, one after the other, and owns what outlives them."""

    @property
    def model(self) -> str:
        """The directory of the model."""
        ...

    @property
    def condemned(self) -> bool:
        """Whether what runs the model is not ours to restart, and should be: it hangs, or answers with nonsense."""
        ...

    def make(self) -> EngineGroup:
        """Returns a new group, not started. The previous one has ended."""
        ...

    async def lost(self, loss: RankLoss, *, served: bool) -> None:
        """Replaces what the lost group may have damaged. Called when that group has ended.

        `served`: the group had become ready.
        """
        ...

    async def close(self, *, sleeps: bool = False) -> None:
        """Ends everything that outlives a group.

        `sleeps`: `make` will be called again, in a while. What makes that start faster may stay, without the model's memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model as the agent knows it before an engine runs it: its directory or file, its context and vocabulary in tokens.

    `token_table` is the packed table of a large vocabulary, for constraints; empty: it is sent when it is needed.
    """

    path: str
    context_length: int
    vocab_size: int
    token_table: bytes = b""


NewEngines = Callable[[EngineModel, GroupEvents], EngineFactory]
"""Chooses an engine: returns what starts and restarts the engine groups of a model."""
