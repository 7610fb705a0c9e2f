"""The messages between the agent and its ranks, in msgpack over socket pairs.

They are the engine's messages and the ranks' own. Every rank has a channel to the agent; rank 0
also has one to each other rank, for the plans.
"""

from __future__ import annotations

import msgspec

from ryzanstein.process.gpus import Device
from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, StepPlan
from ryzanstein.worker.settings.quantization import Kernels, KvCompression, KvDtype, Quantization
from ryzanstein.worker.supervision.messages import EngineMessage, PagesAnswer, ProfileTrace, RankReady, StartProfile

PEER_LOST = 75  # exit code of a rank that ended through no fault of its own (EX_TEMPFAIL of sysexits.h)


class RankSpec(msgspec.Struct, frozen=True):
    """What all ranks of a node are started with.

    `num_blocks` 0: as many as `kv_bytes` of each rank's memory hold; `kv_bytes` 0: a share that the
    rank chooses. `lends_blocks`: the memory of blocks is shared with other models of the node, and
    the engine may be allowed up to `borrow_bytes` on each rank beyond its own. `device`, `dtype`
    and `collectives` may be "auto". `openmp_spins` is how often a thread polls before it sleeps at
    the end of a parallel region; 0: libgomp's own, about a millisecond. `spins` False: a quota leaves
    these threads less than a core each, so that who waits sleeps at once. `nice` is added to the
    agent's own niceness. `kv_compression`: keys and values that are not among the newest
    `kv_hot_tokens` of a sequence are compressed, where our own kernels run. `sparse_attention`: see
    `worker.sparse`. `ranks_before` are the node's ranks of other models that come first on its cores
    and devices. `tokens` is the packed table of a large vocabulary, for constraints.
    """

    model: str  # directory
    tp: int = 1
    device: Device = "auto"
    dtype: str = "auto"
    kv_dtype: KvDtype = "auto"
    quantization: Quantization = "none"
    kernels: Kernels = "auto"
    collectives: str = "auto"
    threads: int = 1
    openmp_spins: int = 0
    spins: bool = True
    nice: int = 0
    pin: bool = False
    ranks_before: int = 0
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
    lends_blocks: bool = False
    borrow_bytes: int = 0
    grammar_cache_bytes: int = 64 * 2**20
    kv_compression: KvCompression = "none"
    kv_hot_tokens: int = 16
    sparse_attention: str = ""
    tokens: bytes = b""


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
    of the KV cache, or pages to copy.

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
