"""The memory that the models of a node share: who takes how much, and who gives way for whom.

The sizes are those of `needs`, or larger ones that were seen. Only the orchestrator's deployments
are bound by it; what the node was started with is loaded in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError


def gibibytes(size: int) -> str:
    """Returns a size for people."""
    return f"{size / 2**30:.2f} GiB"


class ModelMemory:
    """A ledger of bytes by owner. `total` is what the node has for models."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._taken: dict[Hashable, int] = {}
        self._freed = asyncio.Event()

    @property
    def free(self) -> int:
        """Bytes that nobody takes; negative when the node was started with more than it has."""
        return self.total - sum(self._taken.values())

    def taken(self, owner: Hashable) -> int:
        return self._taken.get(owner, 0)

    def take(self, owner: Hashable, size: int) -> bool:
        """Takes `size` bytes if they are free; an owner that has some takes none."""
        if owner in self._taken:
            return True
        if size > self.free:
            return False
        self._taken[owner] = size
        return True

    def grow(self, owner: Hashable, size: int) -> None:
        """Records that an owner takes at least `size` bytes, free or not."""
        self._taken[owner] = max(size, self._taken.get(owner, 0))

    def give_back(self, owner: Hashable) -> None:
        self._taken.pop(owner, None)
        self._notify()

    def hand_over(self, owner: Hashable, to: Hashable) -> None:
        """Gives what `owner` takes to another one, in place of what that one took."""
        self._taken[to] = self._taken.pop(owner, 0)
        self._notify()

    async def freed(self) -> None:
        """Returns when somebody gives memory back."""
        await self._freed.wait()

    def _notify(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()


class Sleeper(Protocol):
    """A model that may be put to sleep; see `idleness.Idleness`."""

    @property
    def rested_s(self) -> float: ...

    async def sleep(self) -> None: ...


class SharedRoom:
    """The room of a model that sleeps while it is idle: it takes memory when it wakes.

    `others` returns the models that may be put to sleep for it: those that are idle and awake.
    """

    def __init__(
        self, memory: ModelMemory, owner: Hashable, others: Callable[[], Sequence[Sleeper]], model: str, size: int
    ) -> None:
        self._memory, self._owner, self._others = memory, owner, others
        self._model, self._size = model, size
        self._closed = False

    async def take(self) -> None:
        """Takes the model's memory; puts the models to sleep that rest longest, as needed.

        Raises UNAVAILABLE when that is not enough, or when the model is removed meanwhile.
        """
        self._require_open()
        while not self._memory.take(self._owner, self._size):
            resting = sorted(self._others(), key=lambda other: -other.rested_s)
            if not resting:
                raise self._no_room()
            await resting[0].sleep()
            self._require_open()

    def give_back(self) -> None:
        self._memory.give_back(self._owner)

    def close(self) -> None:
        """Gives the memory back for good: what is still waking takes none."""
        self._closed = True
        self.give_back()

    def _require_open(self) -> None:
        if self._closed:
            raise errors.unavailable("NODE_NOT_READY", f"model {self._model!r} was removed from the node")

    def _no_room(self) -> RyzansteinError:
        missing = self._size - self._memory.free
        text = f"model {self._model!r} needs {gibibytes(self._size)}, and {gibibytes(missing)} of that are used by busy models"
        return errors.unavailable("NO_ROOM_TO_WAKE", text)
