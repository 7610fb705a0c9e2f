"""Whether the models that the node is to serve come nearer to that, for the orchestrator.

Pure: what is seen of a start is compared with what was seen at the last look.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count


class StartNumbers:
    """A number for each start, which grows whenever what is seen of it differs from the last look."""

    def __init__(self) -> None:
        self._next = count(1)
        self._seen: dict[str, tuple[object, int]] = {}

    def look(self, sights: Mapping[str, object]) -> dict[str, int]:
        """Takes what is seen now of each start, by model; returns their numbers. What is not given has ended."""
        seen: dict[str, tuple[object, int]] = {}
        for model, sight in sights.items():
            known = self._seen.get(model)
            seen[model] = known if known is not None and known[0] == sight else (sight, next(self._next))
        self._seen = seen
        return {model: number for model, (_, number) in seen.items()}
