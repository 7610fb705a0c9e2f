"""What the engine is asked and what a step answers. Plain values that pack with msgpack, because the agent is another process.

A *sequence group* is one attempt of a generation; the agent numbers groups. Each of its choices is a sequence.
"""

from __future__ import annotations

import msgspec

from ryzanstein.generation import SamplingParams


class SubmitGroup(msgspec.Struct, tag=True, frozen=True):
    """Run `sampling.n` choices of one prompt.

    `generated[choice]` is what earlier attempts generated, `finished[choice]` which choices must not run. `stop_token_ids`
    has the model's own unless they are to be ignored. `max_tokens` is resolved: prompt + max_tokens fits the context.
    `deadline` is seconds on the monotonic clock, which all processes of a machine share and nobody sets.
    """

    group: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    generated: list[list[int]]
    finished: list[bool]
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    accepted_before: bool = False  # by a node before this one: it is not refused for coming late
    traceparent: str = ""


class CancelGroup(msgspec.Struct, tag=True, frozen=True):
    """Free the group's blocks before the next step. Nothing more is said about it. Unknown groups are ignored."""

    group: int


class FinishChoice(msgspec.Struct, tag=True, frozen=True):
    """The agent found a stop string: the choice is done. Tokens already on their way are dropped by the agent."""

    group: int
    choice: int


class ChoiceEnd(msgspec.Struct, frozen=True, array_like=True):
    """A choice ended in this step. `reason` is a FinishReason; `cached_tokens` of its prompt were in the prefix cache."""

    group: int
    choice: int
    reason: int
    cached_tokens: int


class GroupFailed(msgspec.Struct, frozen=True, array_like=True):
    """A group ended with an error of this code and reason (see `ryzanstein.errors`)."""

    group: int
    code: int
    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """One priority class: sequences that wait, and tokens computed so far."""

    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's load after a step. `blocks_held` are referenced by sequences; cached ones that could be evicted are not.

    Whatever is not a load counts since the engine's start.
    """

    running: int
    waiting: int
    blocks_held: int
    blocks_cached: int
    preemptions: int  # sequences paused, for whatever cause
    prefix_queries: int  # prompt tokens looked up in the prefix cache so far
    prefix_hits: int  # ... and found
    prefill_tokens: int
    decode_tokens: int
    memory_retries: int = 0  # steps that were given up for want of memory, and done in smaller parts
    expected_wait_s: float = 0.0  # of one that would join the line now
    paused: dict[str, int] = {}  # by cause
    resumed: int = 0
    shed: dict[str, int] = {}  # by cause
    classes: dict[int, ClassStats] = {}  # by priority


class StepEvents(msgspec.Struct, tag=True, frozen=True):
    """What one step produced. Columns are parallel; `logprobs` maps a row to (logprob, [(token id, logprob), ...]).

    `accepted` are the groups that began to run, or to wait in earnest: a refusal comes before it, with few exceptions.
    `taken`: how many of the agent's messages have been taken so far; each is followed by a step's events, with or without work.
    """

    step: int
    groups: list[int]
    choices: list[int]
    token_ids: list[int]
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]
    ended: list[ChoiceEnd]
    failed: list[GroupFailed]
    stats: EngineStats
    step_s: float
    accepted: list[int] = []
    taken: int = 0
