"""Messages between the agent and an engine group, besides those of the engine itself."""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engine.extents import AllLasting
from ryzanstein.worker.engine.messages import (
    CancelGroup,
    DropAdapter,
    ExportPages,
    FindPages,
    FinishChoice,
    ImportPages,
    MapAdapter,
    ReturnChoice,
    SetBlockLimit,
    SetTokens,
    SubmitGroup,
)


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """A request to record a profile on these ranks for so many steps.

    Each trace is returned in ProfileTraces with the same number. Whatever is being recorded anywhere
    is given up; with 0 steps, nothing else happens.
    """

    ranks: tuple[int, ...]
    steps: int
    number: int = 0


class ProfileTrace(msgspec.Struct, tag=True, frozen=True):
    """A Chrome trace in JSON, or the next part of one.

    It is empty when it would be too large, or when `error` says why there is none.
    """

    rank: int
    trace: bytes
    number: int = 0
    error: str = ""
    more: bool = False


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """A rank that has loaded and warmed up.

    `startup_phases` are durations in seconds by phase (spawn, import, group, load, warm_up).
    `resident_bytes` is the rank's resident memory at the end of each phase, `peak_bytes` its peak
    until then. `without_kernels`: why the rank computes with torch's operators alone; empty if it
    has kernels of our own. `company_matters`: why the bits of a row's logits may depend on the
    other rows of its steps; empty if they do not. `kernels`: which library its own kernels are of,
    compiled for the machine or packaged for a level; empty without. The engine may use `num_blocks`
    until the agent sets another limit, of at most `max_blocks`; 0: no more. `block_bytes` is the
    size of a block on this rank. `without_lending`: why blocks can neither be borrowed nor lent;
    empty if they can. `quantization` is the format of its weights, and `divergence` what the choice
    of it rests on, in nats for each token; None if it was set. `windows` are the extents of its
    groups of layers, see `Extents`, as are `lasting` pages; `sparse_attention` is the rule that is in
    force. `context_bytes` is the size that a rank's KV cache would need for
    one sequence as long as the model's context; 0 if it has that. `kv_compression` is how older keys
    and values are kept; with it, the newest `hot_tokens` of a sequence are in `hot_pages`.
    `without_compression`: why it is not as set. `page_bytes` is the size of a page with the heads
    of all ranks, `page_format` what is in it; 0: pages cannot leave the ranks. `hot_page_bytes` is
    that of a hot page; 0: there are none. `numerics`: how it computes, see `Numerics`.
    `content`: what tells its files from others of the same place, a digest.
    `num_unpacked`: the matrices that the file has in blocks and this rank keeps as floats, because its
    columns are not whole blocks. `native_layers` is the share of layers that small steps run in one native
    call; `without_native`: why it is not all of them. `num_states` are slots of `state_bytes` on this rank, for
    states that some layers keep instead of keys and values; 0: none does.
    `weights_stamp`: which files it loaded, see `weight_files.stamp`. `engine`, `unsupported` and
    `continues_exactly` are as in `EngineTraits`. `adaptable` are the inputs and outputs of each weight that
    takes an adapter, whole, by its name in the checkpoint; an engine that is not ours has none.
    """

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
    kernels: str = ""
    max_blocks: int = 0
    block_bytes: int = 0
    without_lending: str = ""
    quantization: str = "none"
    divergence: float | None = None
    windows: tuple[int | None, ...] = (None,)
    context_bytes: int = 0
    kv_compression: str = "none"
    hot_pages: int = 0
    hot_tokens: int = 0
    without_compression: str = ""
    num_unpacked: int = 0
    native_layers: float = 0.0
    without_native: str = ""
    page_bytes: int = 0
    page_format: str = ""
    numerics: str = ""
    content: str = ""
    hot_page_bytes: int = 0
    lasting: AllLasting = ()
    sparse_attention: str = ""
    num_states: int = 0
    state_bytes: int = 0
    weights_stamp: str = ""
    engine: str = ""
    unsupported: list[str] = []
    continues_exactly: bool = True
    adaptable: dict[str, tuple[int, int]] = {}


class PagesAnswer(msgspec.Struct, tag=True, frozen=True):
    """A rank's answer to a request about pages: it has done its part.

    `places` is the engine's answer, from rank 0.
    """

    number: int
    rank: int
    places: list[int] = []


PageRequest = FindPages | ExportPages | ImportPages
AdapterChange = MapAdapter | DropAdapter
GroupChange = SubmitGroup | CancelGroup | FinishChoice | ReturnChoice
EngineMessage = GroupChange | SetBlockLimit | StartProfile | SetTokens | PageRequest | AdapterChange
