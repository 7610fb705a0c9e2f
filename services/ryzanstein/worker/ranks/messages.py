"""The messages between the agent and its ranks, in msgpack over socket pairs.

They are the engine's messages and the ranks' own. Every rank has a channel to the agent; rank 0
also has one to each other rank, for the plans.
"""

from __future__ import annotations

import msgspec

from ryzanstein.process.gpus import Device
from ryzanstein.worker.engine.messages import DropAdapter, MapAdapter, StepEvents
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, StepPlan
from ryzanstein.worker.settings.rank_settings import ModelSettings, QueueSettings
from ryzanstein.worker.supervision.messages import EngineMessage, PagesAnswer, ProfileTrace, RankReady, StartProfile

PEER_LOST = 75  # exit code of a rank that ended through no fault of its own (EX_TEMPFAIL of sysexits.h)


class RankSpec(msgspec.Struct, frozen=True):
    """What all ranks of a node are started with."""

    model: str
    """Its directory or file."""
    tp: int = 1
    settings: ModelSettings = ModelSettings()
    queue: QueueSettings = QueueSettings()
    device: Device = "auto"
    collectives: str = "auto"
    threads: int = 1
    """Of each rank."""
    openmp_spins: int = 0
    """How often a thread polls before it sleeps at the end of a parallel region; 0: libgomp's own, about a millisecond."""
    spins: bool = True
    """False: a quota leaves these threads less than a core each, so that who waits sleeps at once."""
    nice: int = 0
    """Is added to the agent's own niceness."""
    pin: bool = False
    ranks_before: int = 0
    """The node's ranks of other models that come first on its cores and devices."""
    log_level: str = "info"
    node_id: str = ""
    grammar_cache_bytes: int = 64 * 2**20
    """Of the compiled constraints, on rank 0."""
    tokens: bytes = b""
    """The packed table of a large vocabulary, for constraints."""


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """The first message to every rank.

    The numbers are inherited file descriptors. `plan_fds` are rank 0's channels to ranks 1, 2, ...,
    or another rank's one channel to rank 0. `store_fd` is an empty file through which gloo and NCCL
    find each other. `slab_fd` is an empty file until the agent makes it the slab, through which
    pages pass. `spawned_s` is the monotonic time at which the process was started.
    """

    rank: int
    spec: RankSpec
    board_fd: int
    segment_fd: int
    store_fd: int
    slab_fd: int
    plan_fds: list[int]
    spawned_s: float


class CheckRanks(msgspec.Struct, tag=True, frozen=True):
    """A check of idle ranks: each writes the number on the board. Numbers grow from 1."""

    number: int


AgentMessage = StartRank | EngineMessage | CheckRanks


class RankRefused(msgspec.Struct, tag=True, frozen=True):
    """A refusal: these ranks cannot serve the model; retrying does not help.

    The message names the tensor, file or numbers.
    """

    message: str


class RankCrashed(msgspec.Struct, tag=True, frozen=True):
    """An unexpected exception; the process ends after it.

    `unsound`: the ranks no longer compute finite logits.
    """

    rank: int
    message: str
    unsound: bool = False


RankMessage = RankReady | RankRefused | RankCrashed | StepEvents | ProfileTrace | PagesAnswer


class RankCommand(msgspec.Struct, frozen=True, array_like=True):
    """A command of rank 0 to the others: a step, a profile to record from here on, a check, a change
    of the KV cache, pages to copy, or an adapter to keep or to forget.

    `epoch` counts the steps that were given up. A command with nothing else says that rank 0 has
    given one up; a plan of an epoch that a rank has already left is void. `check`: no step, an
    answer is requested (see `CheckRanks`).
    """

    plan: StepPlan | None
    profile: StartProfile | None = None
    epoch: int = 0
    check: int = 0
    change: Rearrangement | None = None
    pages: PageMove | None = None
    adapter: MapAdapter | DropAdapter | None = None
