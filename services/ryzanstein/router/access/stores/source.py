"""The interface of a source of keys, and the keys that the router holds of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.auth.keys.records import KeySnapshot


class KeysUnreadableError(Exception):
    """A source of keys cannot be read at the moment, or has what are no keys. The message has no secret."""


@dataclass(frozen=True, slots=True)
class FoundKeys:
    """Keys that a source has. `age_s` is how old they are: above 0 only for a copy of an earlier run."""

    snapshot: KeySnapshot
    age_s: float = 0.0


class KeySource(Protocol):
    """Where keys come from. Whatever takes long happens in a thread."""

    name: str

    async def saved(self) -> FoundKeys | None:
        """Returns the copy of an earlier run, for a start while the source is away; None: there is none."""
        ...

    async def newer(self) -> KeySnapshot | None:
        """Returns the keys if they are other ones than at the last call, else None.

        Raises KeysUnreadableError, as often as it is called, until the source is well again.
        """
        ...

    async def close(self) -> None: ...


class HeldKeys:
    """The keys by which the router goes: the last good ones, and when they were last seen to be current.

    Older than `max_age_s` they are not trusted. None: a source on this machine, which is never that far away.
    """

    def __init__(self, max_age_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s, self._clock = max_age_s, clock
        self._current_at = -math.inf
        self.snapshot = KeySnapshot()

    @property
    def age_s(self) -> float:
        return self._clock() - self._current_at

    @property
    def are_trusted(self) -> bool:
        return self.age_s <= (math.inf if self._max_age_s is None else self._max_age_s)

    def hold(self, found: FoundKeys) -> None:
        self.snapshot = found.snapshot
        self.confirm(found.age_s)

    def confirm(self, age_s: float = 0.0) -> None:
        """Notes that the keys were those of the source `age_s` ago."""
        self._current_at = self._clock() - age_s
