"""Models that the cluster served until their last node disappeared.

Such a node may be cut off from the orchestrator for a while, or restarting. A request for its
model is not the client's mistake: it waits, and may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable

_KEEP_S = 3600.0


class DepartedModels:
    """The names, each for `keep_s` seconds since it was last added. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float], keep_s: float = _KEEP_S) -> None:
        self._now = now
        self._keep_s = keep_s
        self._until: dict[str, float] = {}

    def add(self, model: str) -> None:
        now = self._now()
        self._until = {name: until for name, until in self._until.items() if until > now}
        self._until[model] = now + self._keep_s

    def __contains__(self, model: str) -> bool:
        return self._until.get(model, 0.0) > self._now()
