"""What the agent and its ranks say to each other, msgpack over socket pairs: the engine's messages and the ranks' own.

Every rank has a channel to the agent; rank 0 has one more to each other rank, for the plans.
"""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, StepEvents, SubmitGroup
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.quantization import Kernels, KvDtype, Quantization

PEER_LOST = 75  # exit code of a rank whose own fault it was not (EX_TEMPFAIL of sysexits.h)


class RankSpec(msgspec.Struct, frozen=True):
    """What all ranks of a node are started with. `num_blocks` 0: as many as `kv_bytes` of each rank's memory hold;
    `kv_bytes` 0: a share that the rank finds sensible. `device`, `dtype` and `collectives` may be "auto". `openmp_spins` is how
    often a thread looks before it sleeps at the end of a parallel region; 0: libgomp's own, about a millisecond. `nice` is
    added to the agent's own niceness."""

    model: str  # directory
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: KvDtype = "auto"
    quantization: Quantization = "none"
    kernels: Kernels = "auto"
    collectives: str = "auto"
    threads: int = 1
    openmp_spins: int = 0
    nice: int = 0
    pin: bool = False
    block_size: int = 16
    num_blocks: int = 0
    kv_bytes: int = 0
    max_sequences: int = 64
    max_tokens_per_step: int = 512
    max_waiting: int = 256
    fair: bool = True
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    log_level: str = "info"
    node_id: str = ""


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """The first message to every rank. The numbers are inherited file descriptors; `plan_fds` are rank 0's channels to ranks
    1, 2, ..., or another rank's one channel to rank 0. `store_fd` is an empty file that gloo and NCCL meet in.
    `spawned_s` is the monotonic time at which the process was started."""

    rank: int
    spec: RankSpec
    board_fd: int
    segment_fd: int
    store_fd: int
    plan_fds: list[int]
    spawned_s: float


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Record the torch profiler on one rank for so many steps; the trace comes back as ProfileTrace with the same number. What
    is being recorded anywhere is given up; with 0 steps, nothing else."""

    rank: int
    steps: int
    number: int = 0


class CheckRanks(msgspec.Struct, tag=True, frozen=True):
    """Asks idle ranks whether they are there: each writes the number on the board. Numbers grow from 1."""

    number: int


AgentMessage = StartRank | SubmitGroup | CancelGroup | FinishChoice | StartProfile | CheckRanks


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """This rank has loaded and warmed up. Durations in seconds by phase (spawn, import, group, load, warm_up). Of the rank's
    memory what was resident when a phase ended, and the most that had been until then. `without_kernels`: why it
    computes with torch's operators alone; empty where it has kernels of our own. `company_matters`: why the bits of a row's
    logits may depend on the other rows of its steps; empty where they do not."""

    rank: int
    context_length: int
    num_blocks: int
    block_size: int
    max_sequences: int
    startup_phases: dict[str, float]
    resident_bytes: dict[str, int] = {}
    peak_bytes: dict[str, int] = {}
    without_kernels: str = ""
    company_matters: str = ""


class RankRefused(msgspec.Struct, tag=True, frozen=True):
    """The model cannot be served by these ranks, whatever is retried: the message names the tensor, file or numbers."""

    message: str


class RankCrashed(msgspec.Struct, tag=True, frozen=True):
    """An exception that nobody expected; the process ends after it. `unsound`: the ranks compute no numbers any more."""

    rank: int
    message: str
    unsound: bool = False


class ProfileTrace(msgspec.Struct, tag=True, frozen=True):
    """A Chrome trace, JSON; empty when it is too large, or with the `error` for which there is none."""

    rank: int
    trace: bytes
    number: int = 0
    error: str = ""


RankMessage = RankReady | RankRefused | RankCrashed | StepEvents | ProfileTrace


class RankCommand(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells the others: a step, or without one that a rank records its profile from here on.

    `epoch` counts the steps that were given up. Without anything else it says that rank 0 has given one up; a plan of an epoch
    that a rank has left already is void. `check`: no step, an answer is wanted (see `CheckRanks`).
    """

    plan: StepPlan | None
    profile: StartProfile | None = None
    epoch: int = 0
    check: int = 0
