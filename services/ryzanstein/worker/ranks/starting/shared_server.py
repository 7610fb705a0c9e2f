"""One fork server for all models of a node: leases of it, and who leaves it when.

A fork server is a process with torch in memory, and a node needs one, however many models it
serves. Ranks of different models have nothing in common but the server's memory as it was before
they were forked, so one model's crash leaves the ranks of the others alone. A model that suspects
the server leaves it for a new one, and the others stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.source import ForkedRank, GroupWiring, NewRankServer, RankServer

log = structlog.get_logger(__name__)

IDLE_S = 300.0
"""How long a server without models is kept.

It saves the import of torch, one second, when a model is loaded again, and holds 150 MiB meanwhile.
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a server is started with. Models for which it differs cannot share one."""

    command: tuple[str, ...]
    env: frozenset[tuple[str, str]]
    nice: int


@dataclass(eq=False, slots=True)
class _Shared:
    """A server and its users. New users get it unless it is doubtful."""

    kind: _Kind
    server: RankServer
    users: set[RankServerLease] = field(default_factory=set)
    doubtful: bool = False
    ending: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        return self.doubtful and not self.users


class RankServerLease:
    """A model's use of a shared server: a `RankServer` whose `close` ends the use."""

    def __init__(self, servers: RankServers, shared: _Shared) -> None:
        self._servers, self._shared = servers, shared
        self.lost = shared.server.lost

    async def prepare(self, spec: RankSpec, compiling: Callable[[], None]) -> None:
        """See `RankServer`."""
        await self._shared.server.prepare(spec, compiling)

    def wire(self, spec: RankSpec) -> GroupWiring:
        """See `RankServer`."""
        return self._shared.server.wire(spec)

    async def fork(self, rank: int, fds: Sequence[int]) -> ForkedRank:
        """See `RankServer`. Waits while a rank of another model is forked."""
        return await self._shared.server.fork(rank, fds)

    async def close(self) -> None:
        """Leaves the server. It goes on for its other users, and for the next ones."""
        await self._servers.leave(self, self._shared)

    async def discard(self) -> None:
        """Leaves a server that may be at fault. It goes on for its other users, and gets no more."""
        self._shared.doubtful = True
        await self.close()


class RankServers:
    """The fork servers of a node: one, unless a model suspects it or needs a different one.

    A server is started for its first user. A server that nobody uses ends after `idle_s`; a
    doubtful one ends with its last user. Close it when all leases are closed.
    """

    def __init__(self, new_server: NewRankServer = ForkServer, idle_s: float = IDLE_S) -> None:
        self._new_server, self._idle_s = new_server, idle_s
        self._all: list[_Shared] = []
        self._endings: set[asyncio.Task[None]] = set()

    def of(self, model: str) -> NewRankServer:
        """Returns where the ranks of a model come from: `lease`, for every model."""
        return self.lease

    def lease(self, command: Sequence[str], env: Mapping[str, str], nice: int) -> RankServerLease:
        """Returns a lease of the newest server of this kind. This method is a `NewRankServer`.

        OSError: there is none yet, and it cannot be started.
        """
        shared = self._newest(_Kind(tuple(command), frozenset(env.items()), nice))
        if shared.ending is not None:
            shared.ending.cancel()
            shared.ending = None
        lease = RankServerLease(self, shared)
        shared.users.add(lease)
        return lease

    async def leave(self, lease: RankServerLease, shared: _Shared) -> None:
        """Ends a lease, and the server if it has ended or nobody else is to use it."""
        shared.users.discard(lease)
        if shared.over or shared.server.lost.done():
            await self._end(shared)
        elif not shared.users and shared.ending is None:
            shared.ending = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle, shared)

    async def close(self) -> None:
        """Ends all servers; returns when they have ended."""
        for shared in list(self._all):
            await self._end(shared)
        if self._endings:
            await asyncio.wait(self._endings)

    def _newest(self, kind: _Kind) -> _Shared:
        for shared in reversed(self._all):
            if shared.kind == kind and not shared.doubtful and not shared.server.lost.done():
                return shared
        shared = _Shared(kind, self._new_server(kind.command, dict(kind.env), kind.nice))
        self._all.append(shared)
        return shared

    def _end_idle(self, shared: _Shared) -> None:
        """Ends a server that nobody uses. From now on nobody can lease it."""
        log.info("idle fork server ends", idle_s=self._idle_s)
        shared.doubtful = True
        task = asyncio.create_task(self._end(shared))
        self._endings.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("idle fork server did not end", exc_info=error)

    async def _end(self, shared: _Shared) -> None:
        if shared.ending is not None:
            shared.ending.cancel()
            shared.ending = None
        await shared.server.close()
        if shared in self._all:
            self._all.remove(shared)
