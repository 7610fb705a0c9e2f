"""Reads a generation from any index: its start, the tokens of each choice, its ends.

Slow readers get more tokens in one Delta. A reader that is far behind gets them in turns with the
other tasks of the loop, whatever it does with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping

from ryzanstein import errors
from ryzanstein.generation.tokens import Delta, FinishReason, GenerationEvent, PromptScores
from ryzanstein.router.generations.generation import Generation

MAX_DELTA_TOKENS = 512
MAX_LOGPROB_TOKENS = 128
"""Of a Delta with log probabilities, which take much longer to write than the tokens alone."""
MAX_SCORED_TOKENS = 256


def check_from_index(generation: Generation, from_index: Mapping[int, int]) -> None:
    """Raises INVALID_ARGUMENT for a choice that the generation does not have, or an index past its end.

    While a choice runs its reader may wait for an index that is still to come, up to the most tokens
    that it may have. A choice that was another router's before, and was cancelled, may have had more
    tokens than are known here.
    """
    num_choices = len(generation.log.choices)
    unknown = [choice for choice in from_index if not 0 <= choice < num_choices]
    if unknown:
        raise errors.invalid("from_index", f"choice must be in [0, {num_choices - 1}]", unknown[0])
    for choice, index in from_index.items():
        log, most = generation.log.choices[choice], generation.request.sampling.max_tokens
        cut = log.reason is FinishReason.CANCELLED and generation.epoch
        end = most if log.reason is None or cut else len(log.tokens)
        if end is not None and index > end:
            raise errors.invalid("from_index", f"choice {choice} has at most {end} tokens", index)


async def follow(
    generation: Generation, from_index: Mapping[int, int], *, whole: bool = False
) -> AsyncGenerator[GenerationEvent, None]:
    """Yields the events of a generation, see `Core.follow`. Closing it detaches the reader.

    `from_index` has passed `check_from_index`.
    """
    cursor = _Cursor(generation, from_index, whole)
    news = asyncio.Event()
    generation.reader_came(news)
    try:
        while not cursor.done:
            news.clear()
            settled = generation.settled  # read first: once settled, nothing more comes
            for event in cursor.take():
                yield event
                if cursor.has_more:
                    await asyncio.sleep(0)
            if settled and generation.error is not None:
                # A copy: the frames of this reader, and with them its request, would live as long as the generation.
                raise generation.error.again()
            if not cursor.done:
                await news.wait()
    finally:
        generation.reader_left(news)


class _Cursor:
    """The position of one reader."""

    def __init__(self, generation: Generation, from_index: Mapping[int, int], whole: bool) -> None:
        self._generation = generation
        self._next = [from_index.get(choice, 0) for choice in range(len(generation.log.choices))]
        self._begun = False
        self._prompt_given = 0
        self._ends_given = 0
        self._shows = not whole
        has_logprobs = generation.request.sampling.logprobs is not None
        self._most = MAX_LOGPROB_TOKENS if has_logprobs else MAX_DELTA_TOKENS
        self.has_more = False
        """Whether the event before was as large as one may be: more of the same follows."""
        generation.num_delivered = max(generation.num_delivered, min(self._next[0], len(generation.log.choices[0].tokens)))

    @property
    def done(self) -> bool:
        return self._ends_given == len(self._next)

    def take(self) -> Iterator[GenerationEvent]:
        """Yields everything that is new to this reader."""
        generation = self._generation
        if not self._begun:
            if generation.started is None:
                return
            self._begun = True
            yield generation.started
        yield from self._scores()
        for choice in range(len(self._next)):
            yield from self._deltas(choice)
        while self._ends_given < self._visible_ends:
            end = generation.ended[self._ends_given]
            # Tokens that arrived while this reader handled the events above.
            yield from self._deltas(end.choice)
            self._ends_given += 1
            yield end

    def _scores(self) -> Iterator[PromptScores]:
        prompt = self._generation.prompt
        while (first := self._prompt_given) < len(prompt):
            self._prompt_given = min(len(prompt), first + MAX_SCORED_TOKENS)
            self.has_more = self._prompt_given - first == MAX_SCORED_TOKENS
            yield PromptScores(first, prompt[first : self._prompt_given])

    @property
    def _visible_ends(self) -> int:
        ended = len(self._generation.ended)
        return ended if self._generation.settled or ended < len(self._next) else ended - 1

    def _deltas(self, choice: int) -> Iterator[Delta]:
        log = self._generation.log.choices[choice]
        for first, tokens, node_id in log.runs(self._next[choice], self._most):
            self._next[choice] = end = first + len(tokens)
            self.has_more = len(tokens) == self._most
            if not choice and self._shows and end > self._generation.num_delivered:
                self._generation.num_delivered = end
            yield Delta(choice, first, tokens, node_id, log.moves.get(first))
