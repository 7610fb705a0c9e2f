"""Where ranks come from, for a group and its supervisor: a fork server, or a simulation of one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from ryzanstein.worker.ranks.channel import AgentChannel
from ryzanstein.worker.ranks.messages import RankMessage, RankSpec, StartRank
from ryzanstein.worker.supervision.stacks import ProcessStacks


class Endable(Protocol):
    """A process that runs until it is ended; see `process.WatchedProcess`."""

    exited: asyncio.Future[int]

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: signal.Signals) -> None: ...


class ForkedRank(Endable, Protocol):
    """A rank; see `process.RankProcess`."""

    dying: asyncio.Future[None]

    @property
    def rank(self) -> int: ...

    @property
    def stopped(self) -> bool: ...

    @property
    def resident_bytes(self) -> int: ...

    @property
    def private_bytes(self) -> int: ...

    @property
    def crash(self) -> str:
        """The stacks that the process wrote when it crashed; empty if it did not."""
        ...

    async def stacks(self, watched_s: float) -> ProcessStacks:
        """Returns where its threads are, and what they computed within `watched_s`."""
        ...


class Wires(Protocol):
    """The wires of one rank; see `wiring.RankWires`."""

    @property
    def start(self) -> StartRank: ...

    @property
    def fds(self) -> tuple[int, ...]: ...

    async def connect(self, channel: AgentChannel[RankMessage]) -> None: ...


class GroupWiring(Protocol):
    """The wires of a group; see `wiring.Wiring`."""

    board_fd: int

    @property
    def ranks(self) -> Sequence[Wires]: ...

    def take_slab(self) -> int:
        """Returns a descriptor of the slab that belongs to the caller; -1: the ranks have none."""
        ...

    def __enter__(self) -> GroupWiring: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def close(self) -> None:
        """Closes all that nobody has taken over, also of a group that was never started. May be called again."""
        ...


class RankServer(Protocol):
    """A source of ranks; see `forking.ForkServer`."""

    lost: asyncio.Future[str]

    async def prepare(self, spec: RankSpec, compiling: Callable[[], None]) -> None:
        """Makes what ranks need and may take long to make: the kernels. It has time limits of its own."""
        ...

    def wire(self, spec: RankSpec) -> GroupWiring:
        """Returns the wiring of a group; it belongs to the caller, who closes it. Raises OSError."""
        ...

    async def fork(self, rank: int, fds: Sequence[int]) -> ForkedRank: ...

    async def close(self) -> None:
        """Ends its use. Nobody has a rank of it that runs."""
        ...

    async def discard(self) -> None:
        """Closes it because it may be at fault for a loss: its next user gets another one."""
        ...


NewRankServer = Callable[[Sequence[str], Mapping[str, str], int], RankServer]
"""Takes command, environment and niceness, as `forking.ForkServer` does."""
