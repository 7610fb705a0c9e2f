"""The position of a reader that is passed from router to router."""

from __future__ import annotations

from collections.abc import Mapping

from ryzanstein.generation.events import Delta, Finished, GenerationEvent, PromptScores, Started


class PassedReader:
    """Advances with the events that the reader gets; `wants` is False for one it already has."""

    def __init__(self, from_index: Mapping[int, int]) -> None:
        self.from_index = dict(from_index)
        self._started = False
        self._prompt = 0
        self._ended: set[int] = set()

    def wants(self, event: GenerationEvent) -> bool:
        match event:
            case Started():
                first, self._started = not self._started, True
                return first
            case PromptScores():
                self._prompt, before = max(self._prompt, event.first_index + len(event.tokens)), self._prompt
                return self._prompt > before
            case Delta():
                self.from_index[event.choice] = event.first_index + len(event.tokens)
                return True
            case Finished():
                first = event.choice not in self._ended
                self._ended.add(event.choice)
                return first
