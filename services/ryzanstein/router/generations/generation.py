"""A generation, shared by its readers and its runner: token log, readers, and how it ended.

`cursor.follow` reads it. The last Finished is held back until the generation is settled and its
session's turn is stored, so that a client that has read the end can continue from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from ryzanstein import errors
from ryzanstein.cluster import TokenOrigin
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import Message, Role, TextPrompt
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import Finished, FinishReason, PromptScores, PromptToken, Started, Usage
from ryzanstein.replies.format import reply_format
from ryzanstein.replies.reader import read_aside
from ryzanstein.router.generations.meter import UNMETERED, Meter
from ryzanstein.router.generations.token_log import TokenLog

PAUSED = "GENERATION_PAUSED"
# What a smaller prompt takes is less than what the rest of a request does.
_SMALL_PROMPT_BYTES = 256
STAGES = ("admission", "session", "choose", "accept", "first_token")


def paused(generation_id: str) -> RyzansteinError:
    """Returns the error of a generation that is paused because it has no reader.

    The next reader resumes it.
    """
    return errors.unavailable(PAUSED, f"generation {generation_id[:64]} was paused because nobody read it; attach again")


class GenerationState(Enum):
    """Where a generation is in its life."""

    RUNNING = "running"
    """It has a task: it waits for a node, or a node computes it, or its turn is being stored."""
    PAUSED = "paused"
    """It has stopped because nobody read it. The next reader resumes it."""
    COMPLETE = "complete"
    """It has ended as its request wished, or was cancelled."""
    FAILED = "failed"
    """It has ended with an error; it is resumable if that is retryable."""


@dataclass(slots=True)
class GenerationTimes:
    """Times are seconds of `time.monotonic`; 0: not yet.

    It arrived at the core, was admitted, was submitted when its turn in the session was open, was first sent to a node, was
    first accepted by one, and had its first token and its last one so far. `longest_pause_s` is the longest time between two
    tokens, while it ran.
    """

    arrived_at: float = 0.0
    admitted_at: float = 0.0
    submitted_at: float = 0.0
    sent_at: float = 0.0
    accepted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    longest_pause_s: float = 0.0

    def __post_init__(self) -> None:
        self.arrived_at = self.arrived_at or time.monotonic()

    def submitted(self) -> None:
        """Records that all before the nodes is done. A generation of another router arrives, so to speak, here."""
        self.submitted_at = self.last_token_at = time.monotonic()
        self.admitted_at = self.admitted_at or self.arrived_at

    def stages_s(self) -> dict[str, float]:
        """Returns how long each stage took that is over, in order. They add up to the wait for the first token."""
        began_at, stages = self.arrived_at, {}
        ends = (self.admitted_at, self.submitted_at, self.sent_at, self.accepted_at, self.first_token_at)
        for stage, ended_at in zip(STAGES, ends, strict=True):
            if not ended_at:
                break
            stages[stage] = ended_at - began_at
            began_at = ended_at
        return stages


class RunningAttempt(Protocol):
    """What is known of an attempt that runs."""

    @property
    def attempt(self) -> int: ...

    @property
    def node_id(self) -> str: ...

    @property
    def was_accepted(self) -> bool: ...

    @property
    def fruitful(self) -> bool: ...

    @property
    def moved_at(self) -> float:
        """When it was sent, was accepted, or produced something last, in seconds of `time.monotonic`."""
        ...


class HeldMemory(Protocol):
    """Memory that a generation holds until `release`, which may be called again."""

    @property
    def num_bytes(self) -> int: ...

    def release(self) -> None: ...


class _NothingHeld:
    num_bytes = 0

    def release(self) -> None: ...


_NOTHING_HELD, _NO_PROMPT = _NothingHeld(), TextPrompt("")


class GenerationObserver(Protocol):
    """Receives the events of a generation other than its tokens. Must not block."""

    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None: ...

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: Collection[asyncio.Event]) -> None:
        """Notifies these readers soon."""
        ...


class Generation:
    """A generation of this router. Its runner writes to it; readers `follow` it."""

    def __init__(
        self,
        generation_id: str,
        request: GenerationRequest,
        observer: GenerationObserver,
        epoch: int = 0,
        times: GenerationTimes | None = None,
    ) -> None:
        """`epoch` is the number of routers that had the generation before this one. `times` is its way until now."""
        self.generation_id = generation_id
        self.request = request
        self.epoch = epoch
        self.next_attempt = self.num_attempts = 0
        self.new_messages: tuple[Message, ...] = ()
        """The new messages of its session's turn; empty without a session."""
        self.was_read = False
        self.last_read_at = 0.0
        """When a reader last came or left, in seconds of `time.monotonic`."""
        self.num_delivered = 0
        """How many tokens of the first choice readers were sent, here or at an earlier router."""
        self.abandoned = False
        """Its re-attach window is over: it can be read until it has ended."""
        self.held_prompt: HeldMemory = _NOTHING_HELD
        """The memory of the prompt. It is released at the latest when the generation is forgotten."""
        self.meter: Meter = UNMETERED
        self.log = TokenLog(request.sampling.n)
        self.attempts: Collection[RunningAttempt] = ()
        """The attempts that run now, the oldest first."""
        self.started: Started | None = None
        self.origin: TokenOrigin | None = None
        """Where its last tokens are from; None: it has none, or an earlier router's alone."""
        self.prompt: list[PromptToken] = []
        """The prompt's tokens with their log probabilities, if the client asked for them."""
        self.ended: list[Finished] = []
        self.state = GenerationState.RUNNING
        self.error: RyzansteinError | None = None
        """Why it is paused or has failed."""
        self.times = GenerationTimes() if times is None else times
        self.times.submitted()
        self._observer = observer
        self._readers: dict[asyncio.Event, None] = {}
        self._finished_tokens = 0
        self._cached = 0

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def unread(self) -> bool:
        """True when it had readers and all have left. A detached generation is never unread."""
        return self.was_read and not self._readers and not self.request.detached

    @property
    def paused(self) -> bool:
        return self.state is GenerationState.PAUSED

    @property
    def settled(self) -> bool:
        """Whether it runs no more, or not until it is resumed."""
        return self.state is not GenerationState.RUNNING

    def shrink(self) -> None:
        """Drops what only an unfinished generation needs: a router may retain tens of thousands that have ended."""
        if self.held_prompt.num_bytes > _SMALL_PROMPT_BYTES:
            self.request = replace(self.request, prompt=_NO_PROMPT)
        self.held_prompt.release()
        self.held_prompt, self.meter, self.new_messages, self.attempts = _NOTHING_HELD, UNMETERED, (), ()
        self.log.pack()

    def start(self, node_id: str, prompt_tokens: int, reply: ReplyStyle | None = None, omitted: int = 0) -> None:
        """Records that a node accepted the generation, with so much of its prompt. Only the first call counts."""
        if self.started is None:
            request = self.request
            self.started = Started(
                self.generation_id,
                request.public_model,
                node_id,
                prompt_tokens,
                request.created,
                request.answer_form,
                None if reply is None else reply_format(request.prompt, reply),
                omitted,
            )
            if node_id:
                self.times.accepted_at = time.monotonic()
                self.meter.accepted(prompt_tokens)
            self._observer.generation_started(self)
            self.wake()

    def reads(self, prompt_tokens: int, omitted: int) -> bool:
        """Returns whether an attempt reads what the first accepted one reads of a prompt of which either omits a part.

        Nodes with other contexts may leave out another part. The number of tokens decides which part that is.
        """
        first = self.started
        if first is None or not (omitted or first.omitted_prompt_tokens):
            return True
        return first.prompt_tokens == prompt_tokens

    def score(self, scores: PromptScores) -> None:
        """Records a part of the prompt's log probabilities. What is known already is skipped.

        Raises ValueError for a part that leaves a gap.
        """
        if scores.first_index > len(self.prompt):
            raise ValueError(f"prompt scores from {scores.first_index}, expected {len(self.prompt)}")
        self.prompt += scores.tokens[len(self.prompt) - scores.first_index :]
        self.wake()

    async def message(self, num_tokens: int) -> Message:
        """Returns what so many tokens of the first choice say."""
        text = "".join(token.text for token in self.log.choices[0].tokens[:num_tokens])
        if self.started is None or self.started.reply is None:
            return Message(Role.ASSISTANT, text)
        return await read_aside(self.started.reply, self.generation_id, 0, text)

    @property
    def to_run(self) -> GenerationRequest:
        """The request as the next attempt runs it: of its prompt what the first one kept, without scores that are complete."""
        if self.started is None:
            return self.request
        sampling = self.request.sampling
        if self.started.omitted_prompt_tokens:
            kept, head = self.started.prompt_tokens, sampling.keep_prompt_head or 0
            sampling = replace(sampling, truncate_prompt_tokens=kept, keep_prompt_head=min(head, kept - 1))
        if sampling.prompt_logprobs is not None and 0 < self.started.prompt_tokens <= len(self.prompt):
            sampling = replace(sampling, prompt_logprobs=None)
        return self.request if sampling is self.request.sampling else replace(self.request, sampling=sampling)

    def token_added(self) -> None:
        """Records the time of a new token in the log, and notifies the readers. Ends an answer that may not be longer."""
        now, times = time.monotonic(), self.times
        if not times.first_token_at:
            times.first_token_at = now
            self._observer.first_token(self)
        elif now - times.last_token_at > times.longest_pause_s:
            times.longest_pause_s = now - times.last_token_at
        times.last_token_at = now
        if self.log.num_tokens >= self.meter.next_at and self.meter.grown(self.log.num_tokens):
            for choice in self.log.end_all(FinishReason.LENGTH):
                self.end_choice(choice)
        self.wake()

    def end_choice(self, choice: int, cached_prompt_tokens: int = 0) -> None:
        """Records the end of a choice. Called once per choice, after the log has ended it."""
        self._finished_tokens += len(self.log.choices[choice].tokens)
        self._cached = max(self._cached, cached_prompt_tokens)
        prompt, omitted = (0, 0) if self.started is None else (self.started.prompt_tokens, self.started.omitted_prompt_tokens)
        usage = Usage(prompt, self._finished_tokens, self._cached, omitted)
        reason = self.log.choices[choice].reason
        self.ended.append(Finished(choice, FinishReason.CANCELLED if reason is None else reason, usage))
        self.wake()

    def settle(self, error: RyzansteinError | None = None) -> None:
        """Ends the generation: complete, or failed with `error`.

        Readers get the remaining events, then the last Finished or the error.
        """
        if error is None:
            # Cancelled before any node accepted it: readers still get the events of every stream.
            self.start("", 0)
        if error is not None:
            error.__traceback__ = error.__context__ = None  # their frames have the generation, and what it ran on
        self.error = error
        if error is None:
            self.state = GenerationState.COMPLETE
        else:
            self.state = GenerationState.PAUSED if error.reason == PAUSED else GenerationState.FAILED
        self.wake()

    @property
    def resumable(self) -> bool:
        """True when it is paused, or failed with a retryable error that was sent to a reader.

        The next reader resumes it where it ended.
        """
        return self.paused or (self.was_read and self.error is not None and self.error.retry_after_s is not None)

    def resume(self) -> None:
        """Prepares it to run again.

        Readers that have not received its error yet no longer get it.
        """
        self.error = None
        self.state = GenerationState.RUNNING
        self.times.last_token_at = time.monotonic()  # while it did not run it was not silent

    def wake(self) -> None:
        if self._readers:
            self._observer.has_news(self._readers)

    def reader_came(self, news: asyncio.Event) -> None:
        """Adds a reader. `news` is set when there is more to read, until `reader_left`."""
        self.was_read = True
        self.last_read_at = time.monotonic()
        self._readers[news] = None
        self._observer.readers_changed(self)

    def reader_left(self, news: asyncio.Event) -> None:
        self._readers.pop(news, None)
        self.last_read_at = time.monotonic()
        self._observer.readers_changed(self)
