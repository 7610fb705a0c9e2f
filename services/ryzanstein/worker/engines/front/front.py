"""The line before an engine of others: it decides who runs, the engine only computes.

It is what `engine.Engine` is around its executor, with places instead of blocks and steps: the same
groups, tenants, priorities, deadlines and refusals. An engine is given a sequence when there is a
place for it, and returns its tokens one by one. Our own rules decide which token is the last.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.groups import Groups
from ryzanstein.worker.engine.messages import CancelGroup, ClassStats, EngineStats, FinishChoice, StepEvents, SubmitGroup
from ryzanstein.worker.engine.outcome import StepOutcome
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engine.scheduling.pace import StepPace
from ryzanstein.worker.engine.scheduling.places import Places
from ryzanstein.worker.engine.scheduling.shedding import LOOK_EVERY_S
from ryzanstein.worker.engine.sequence import DECODE_WEIGHT, Sequence
from ryzanstein.worker.settings.rank_settings import QueueSettings

_IDLE_LOOK_S = 0.1  # deadlines are kept to this while nothing happens


class SequenceEngine(Protocol):
    """Computes sequences independently of each other. Neither call waits, nor calls the front back."""

    def begin(self, sequence: Sequence) -> None:
        """Computes the next tokens of a sequence, as many as it is allowed. They are reported to `Front.token`."""
        ...

    def drop(self, sequence: Sequence) -> None:
        """Stops to compute a sequence: nothing of it is wanted any more. It may have ended already."""
        ...


def front_settings(context_length: int, num_places: int, prefill_room: int, queue: QueueSettings) -> EngineSettings:
    """Returns the settings of a front. A sequence may have `context_length` tokens, each in a block of its own."""
    return EngineSettings(
        num_blocks=context_length,
        block_size=1,
        max_sequences=num_places,
        token_budget=max(num_places, prefill_room),
        queue=queue,
    )


class Front:
    """A front that sequence groups pass through. Not thread-safe: one event loop calls everything.

    `emit` is called in the loop with what happened, as an engine's step: a tick of the loop at most,
    and at most one token of a choice. `measured` is called with the seconds that each token took, and
    with the number of tokens of the prompt before the first one, else 0.
    """

    def __init__(
        self,
        settings: EngineSettings,
        engine: SequenceEngine,
        emit: Callable[[StepEvents], None],
        clock: Callable[[], float] = time.monotonic,
        measured: Callable[[float, int], None] = lambda passed_s, num_prompt: None,
    ) -> None:
        self._settings, self._engine, self._emit, self._clock = settings, engine, emit, clock
        self._measured = measured
        self._loop = asyncio.get_running_loop()
        self._pace, self._outcome = StepPace(), StepOutcome()
        self._places = Places(settings.max_sequences, settings.token_budget, settings.max_idle_tenants, self._left)
        self._groups = Groups(settings, self._places, self._outcome, self._pace)
        self._moved: dict[Sequence, float] = {}
        """The running sequences, and when each began or had its last token."""
        self._told: set[Sequence] = set()
        """The sequences that have a token in the events that come next."""
        self._soon: asyncio.Handle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._step = 0
        self._taken = self._reported = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._num_decoded: Counter[int] = Counter()
        self._num_prefilled: Counter[int] = Counter()
        self._reported_s = clock()

    def __len__(self) -> int:
        """The sequences that the engine computes."""
        return len(self._moved)

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences at the engine that have no token yet."""
        return [sequence for sequence in self._moved if not sequence.num_computed]

    def send(self, message: SubmitGroup | CancelGroup | FinishChoice) -> None:
        """Takes a message of the agent. Refusals are events, like those of an engine."""
        self._taken += 1
        match message:
            case SubmitGroup():
                self._groups.submit(message, self._clock())
            case CancelGroup(group):
                self._groups.cancel(group)
            case FinishChoice(group, choice):
                self._groups.finish(group, choice)
        self._run_soon()

    def close(self) -> None:
        """Stops. Sequences are forgotten; nothing is reported any more."""
        for handle in (self._soon, self._look):
            if handle is not None:
                handle.cancel()
        self._emit = lambda _: None
        self._moved.clear()

    def token(self, sequence: Sequence, token: SampledToken, *, num_cached: int = 0, complete: bool = False) -> None:
        """Takes the next token of a sequence; drops what comes after its last one.

        `num_cached` of its tokens were in the engine's prefix cache, where that is known with the first token. `complete`:
        the engine knows that nothing may follow this one.
        """
        if sequence in self._told:
            self._report()
        if sequence not in self._moved:
            return
        self._told.add(sequence)
        self._measure(sequence, num_cached)
        group = sequence.group
        group.account.counter += DECODE_WEIGHT
        self._num_decoded[group.priority] += 1
        reason = sequence.append(token.token_id)
        if complete:
            reason = FinishReason.STOP
        sequence.num_computed = sequence.num_tokens - 1
        self._outcome.add_token(sequence, token)
        if group.followers:
            self._groups.release_followers(sequence)
        if reason is not None:
            self._groups.end(sequence, reason)
        self._run_soon()

    def scored(self, sequence: Sequence, tokens: list[SampledToken]) -> None:
        """Takes how likely the tokens of the prompt are, from the second on."""
        if sequence in self._moved:
            sequence.group.num_scored = sequence.group.num_prompt
            self._outcome.add_scores(sequence, 1, tokens)
            self._run_soon()

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a choice that the engine has ended by itself."""
        if sequence in self._moved:
            self._groups.end(sequence, reason)
            self._run_soon()

    def failed(self, sequence: Sequence, error: RyzansteinError) -> None:
        """Ends the group of a sequence that the engine could not compute."""
        if sequence in self._moved:
            self._groups.fail(sequence.group.id, error)
            self._run_soon()

    def computing(self, sequence: Sequence, num_computed: int = 0) -> None:
        """Reports that the engine is at the sequence's prompt, of which so many tokens are known to be computed."""
        if sequence in self._moved and not sequence.num_computed:
            self._outcome.add_prefilled(sequence, num_computed)
            self._run_soon()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._places.running),
            waiting=self._groups.num_waiting,
            blocks_held=0,
            blocks_cached=0,
            preemptions=0,
            prefix_queries=self._places.num_queried,
            prefix_hits=self._places.num_cached,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            expected_wait_s=self._groups.shedding.newcomer_s,
            shed=dict(self._groups.num_shed),
            classes={
                priority: ClassStats(num_waiting, self._num_prefilled[priority], self._num_decoded[priority])
                for priority, num_waiting in self._places.waiting.num_waiting.items()
            },
        )

    def _measure(self, sequence: Sequence, num_cached: int) -> None:
        """Counts a token, and learns the engine's pace from the time since the one before: that is a step to this sequence."""
        now = self._clock()
        passed_s, self._moved[sequence] = now - self._moved[sequence], now
        self._measured(passed_s, 0 if sequence.num_computed else sequence.num_tokens)
        if sequence.num_computed:
            self._decode_tokens += 1
            self._pace.step(0, passed_s)
            return
        num_tokens = sequence.num_tokens
        self._places.began(sequence, num_cached)
        num_uncached = num_tokens - min(num_cached, num_tokens)
        self._prefill_tokens += num_uncached
        self._num_prefilled[sequence.group.priority] += num_uncached
        self._pace.step(num_uncached, passed_s)

    def _left(self, sequence: Sequence) -> None:
        """Tells the engine that a sequence has given its place back."""
        if self._moved.pop(sequence, None) is not None:
            self._engine.drop(sequence)

    def _run_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Admits, refuses and reports; comes back in time for the next deadline while there are groups."""
        self._soon = None
        now = self._clock()
        self._groups.expire(now)
        for sequence in self._places.admit():
            self._moved[sequence] = now
            self._engine.begin(sequence)
        self._report()
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if len(self._groups):
            again_s = LOOK_EVERY_S if self._places.waiting else _IDLE_LOOK_S
            self._look = self._loop.call_later(again_s, self._run_soon)

    def _report(self) -> None:
        """Emits what has happened since the last time. The agent may send messages meanwhile."""
        self._told.clear()
        if self._outcome.empty and self._reported == self._taken:
            return
        self._step += 1
        self._reported = self._taken
        now = self._clock()
        step_s, self._reported_s = now - self._reported_s, now
        events = self._outcome.take(self._step, self.stats(), step_s)
        self._emit(events)
