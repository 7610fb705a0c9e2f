"""The worker's constants, which no operator needs. Those of a room stand in the room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import LARGEST, PositiveSeconds, PositiveSize, Seconds, Size
from ryzanstein.rpc.reading import MAX_RECORDS, RecordBound
from ryzanstein.worker.engines.remote.bounds import RemoteBounds
from ryzanstein.worker.ranks.group import GroupBounds
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.settings.rank_settings import ModelSettings
from ryzanstein.worker.supervision.recovery import RecoveryPolicy
from ryzanstein.worker.text.programs.starting import ProgramBounds, ProgramMemory, ProgramSeconds

_SPEC = RankSpec(model="")


@dataclass(frozen=True, slots=True)
class TemplateBounds(ProgramBounds):
    """The bounds of the program that applies chat templates: a job is one conversation."""

    cpu_s: ProgramSeconds = 1.0
    memory_bytes: ProgramMemory = 512 * 2**20
    max_waiting: PositiveSize = 1024


@dataclass(frozen=True, slots=True)
class GrammarBounds(ProgramBounds):
    """The bounds of the program that compiles constraints on answers: a job is one constraint."""

    cpu_s: ProgramSeconds = 2.0
    memory_bytes: ProgramMemory = 512 * 2**20
    max_waiting: PositiveSize = 256


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """What may wait for one router before its link is closed."""

    rows: PositiveSize = 65536
    """Tokens, ends and failures."""
    bytes: Annotated[int, Field(ge=1024, le=LARGEST)] = 8 * 2**20
    """Their approximate size."""


@dataclass(frozen=True, slots=True)
class WorkerTuning:
    """The worker's constants."""

    ranks: GroupBounds = field(default_factory=GroupBounds)
    engine: RemoteBounds = field(default_factory=RemoteBounds)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    templates: TemplateBounds = field(default_factory=TemplateBounds)
    grammars: GrammarBounds = field(default_factory=GrammarBounds)
    links: LinkBounds = field(default_factory=LinkBounds)
    grammar_cache_bytes: Size = _SPEC.grammar_cache_bytes
    """Memory for the compiled constraints of each model, on its rank 0."""
    rank_nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of ranks, so that the agent has priority; 0: none."""
    openmp_spins: Size = _SPEC.openmp_spins
    """Spins of an idle OpenMP thread before it sleeps; 0: OpenMP's default; where cores are shared: 1500."""
    kv_hot_tokens: Annotated[int, Field(ge=16, le=4096)] = ModelSettings().kv_hot_tokens
    """Newest tokens of a sequence that are never compressed."""
    kv_states: Annotated[int, Field(ge=0)] = 0
    """Slots for the states that some layers keep instead of keys and values, three for each sequence that runs at once;
    0: those that `max_sequences` want, up to half of the KV cache."""
    kv_borrow_bytes: Size = 0
    """KV memory that a rank may borrow; 0: as much as `kv_bytes`, or 1 GiB without that."""
    kv_disk_keep_s: Seconds = 7 * 86_400.0
    """Folders of `kv_disk_dir` that no node has used for so many seconds are removed at a start; 0: never."""
    beat_busy_s: Annotated[float, Field(gt=0, le=10)] = 0.05
    """Interval of status beats while work runs, in seconds."""
    beat_idle_s: Annotated[float, Field(gt=0, le=10)] = 0.5
    """Interval of status beats while the node is idle, in seconds."""
    router_silence_s: PositiveSeconds = 5.0
    """Seconds of silence after which a router is lost and its work is cancelled."""
    max_request_records: RecordBound = 2 * MAX_RECORDS
    """Fields of a router's message, including those of nested messages."""


MOVED: Mapping[str, str] = MappingProxyType(
    {
        "start_timeout_s": "ranks.start_s",
        "watch_interval_s": "ranks.watch_interval_s",
        "stop_grace_s": "ranks.stop_grace_s",
        "idle_check_s": "ranks.idle_check_s",
        "stall_min_s": "ranks.stall.min_s",
        "stall_factor": "ranks.stall.factor",
        "slow_factor": "ranks.slow.factor",
        "slow_warn_s": "ranks.slow.warn_s",
        "slow_restart_s": "ranks.slow.restart_s",
        "restart_first_s": "recovery.first_s",
        "restart_longest_s": "recovery.longest_s",
        "crash_limit": "recovery.crash_limit",
        "loss_limit": "recovery.loss_limit",
        "loss_window_s": "recovery.window_s",
        "quarantine_s": "recovery.quarantine_s",
        "longest_quarantine_s": "recovery.longest_quarantine_s",
        "quarantine_limit": "recovery.quarantine_limit",
        "template_cpu_s": "templates.cpu_s",
        "template_memory_bytes": "templates.memory_bytes",
        "template_waiting": "templates.max_waiting",
        "grammar_cpu_s": "grammars.cpu_s",
        "grammar_memory_bytes": "grammars.memory_bytes",
        "grammar_waiting": "grammars.max_waiting",
        "link_rows": "links.rows",
        "link_bytes": "links.bytes",
        "grammar_cache_bytes": "grammar_cache_bytes",
        "rank_nice": "rank_nice",
        "openmp_spins": "openmp_spins",
        "kv_hot_tokens": "kv_hot_tokens",
        "kv_borrow_bytes": "kv_borrow_bytes",
        "kv_disk_keep_s": "kv_disk_keep_s",
        "beat_busy_s": "beat_busy_s",
        "beat_idle_s": "beat_idle_s",
        "router_silence_s": "router_silence_s",
        "max_request_records": "max_request_records",
    }
)
"""Settings of earlier releases, and their places here."""
