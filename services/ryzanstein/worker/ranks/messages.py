"""What the agent and rank 0 say to each other, msgpack over a socket pair: the engine's messages and the ranks' own."""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, StepEvents, SubmitGroup


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Record the torch profiler on one rank for so many steps; the trace comes back as ProfileTrace."""

    rank: int
    steps: int


AgentMessage = SubmitGroup | CancelGroup | FinishChoice | StartProfile


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """All ranks have loaded and warmed up. Durations in seconds by phase (import, group, load, warm_up) for each rank."""

    context_length: int
    num_blocks: int
    block_size: int
    max_sequences: int
    startup_phases: list[dict[str, float]]


class RankRefused(msgspec.Struct, tag=True, frozen=True):
    """The model cannot be served by these ranks, whatever is retried: the message names the tensor, file or numbers."""

    message: str


class ProfileTrace(msgspec.Struct, tag=True, frozen=True):
    """A Chrome trace, JSON."""

    rank: int
    trace: bytes


RankMessage = RankReady | RankRefused | StepEvents | ProfileTrace
