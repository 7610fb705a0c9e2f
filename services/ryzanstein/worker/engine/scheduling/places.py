"""Places at an engine that has a batch, blocks and a prefix cache of its own: who has one, and who waits.

An inference server of others admits what it is sent in the order of arrival and knows no tenants. So
it is sent no more than it runs at once, and the line is here. A sequence that has its place keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ryzanstein.worker.engine.scheduling.queue import OrderedSequences, WaitingLine
from ryzanstein.worker.engine.sequence import PREFILL_WEIGHT, Sequence


class SequenceScheduler(Protocol):
    """What groups and load shedding need of a scheduler: `Scheduler` with blocks, `Places` without."""

    @property
    def running(self) -> OrderedSequences: ...

    @property
    def waiting(self) -> WaitingLine: ...

    @property
    def num_places(self) -> int: ...

    @property
    def prefill_room(self) -> int:
        """The prompt tokens that a step has room for; at least 1."""
        ...

    @property
    def mean_uncached(self) -> float:
        """The mean number of uncached prompt tokens of the sequences admitted so far."""
        ...

    def num_uncached(self, sequence: Sequence) -> int:
        """Returns the tokens that a waiting sequence must compute before its first new token."""
        ...

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...


class Places:
    """A fixed number of places. `prefill_room` is how many prompt tokens the engine takes in a step, about.

    `left` is called with each sequence that gives its place back.
    """

    def __init__(
        self, num_places: int, prefill_room: int, max_idle_tenants: int, left: Callable[[Sequence], None] = lambda _: None
    ) -> None:
        self.num_places, self.prefill_room, self._left = num_places, prefill_room, left
        self.running = OrderedSequences("rank")
        self.waiting = WaitingLine(max_idle_tenants)
        self._num_admitted = 0
        self.num_queried = 0
        """Prompt tokens of the sequences whose first token is known."""
        self.num_cached = 0
        """... and how many of them the engine had cached."""

    @property
    def mean_uncached(self) -> float:
        return (self.num_queried - self.num_cached) / max(1, self._num_admitted)

    def num_uncached(self, sequence: Sequence) -> int:
        """Returns all of its tokens: what the engine has cached of them is not known before."""
        return sequence.num_tokens

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to the line."""
        self.waiting.insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has a place or waits for one."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._left(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def admit(self) -> Iterator[Sequence]:
        """Gives free places to the first of the line, and yields them. Their prompts are charged to their tenants now."""
        while len(self.running) < self.num_places and (sequence := self.waiting.first) is not None:
            self.waiting.remove(sequence)
            group = sequence.group
            group.fresh = False
            sequence.rank = (-group.priority, self._num_admitted)
            self._num_admitted += 1
            group.account.counter += PREFILL_WEIGHT * sequence.num_tokens
            self.running.insert(sequence)
            yield sequence

    def began(self, sequence: Sequence, num_cached: int) -> None:
        """Records that the engine has computed the prompt, of which so many tokens were cached: those cost nothing."""
        num_cached = min(num_cached, sequence.num_tokens)
        sequence.cached_tokens = min(num_cached, sequence.group.num_prompt)
        sequence.num_computed = sequence.num_tokens
        sequence.group.account.counter -= PREFILL_WEIGHT * num_cached
        self.num_queried += sequence.group.num_prompt
        self.num_cached += sequence.cached_tokens
