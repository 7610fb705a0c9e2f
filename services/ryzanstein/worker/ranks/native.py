"""The native engine of a model: groups of ranks that are forked from one server."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import RANK_COMMAND, ForkServer
from ryzanstein.worker.ranks.starting.process import thread_environment
from ryzanstein.worker.ranks.starting.source import NewRankServer, RankServer
from ryzanstein.worker.supervision.group import GroupEvents, LossCause, RankLoss


class NativeEngines:
    """An `EngineFactory` of rank groups. The fork server outlives a group unless it is doubtful.

    `new_server` starts one for this model, or leases one that several models share
    (`shared_server.RankServers.lease`).
    """

    def __init__(
        self,
        spec: RankSpec,
        bounds: GroupBounds,
        events: GroupEvents,
        *,
        command: Sequence[str] = RANK_COMMAND,
        new_server: NewRankServer = ForkServer,
    ) -> None:
        self._spec, self._bounds, self._events = spec, bounds, events
        self._command, self._make_server = command, new_server
        self._server: RankServer | None = None

    @property
    def model(self) -> str:
        return self._spec.model

    @property
    def condemned(self) -> bool:
        return False

    def make(self) -> RankGroup:
        """See `EngineFactory.make`. OSError: the server cannot be started."""
        server = self._server = self._server or self._new_server()
        return RankGroup(self._spec, self._bounds, self._events, server)

    async def lost(self, loss: RankLoss, *, served: bool) -> None:
        """See `EngineFactory.lost`.

        Ranks start with a copy of the server's memory, whatever has happened to that. So the server
        may be at fault when the group has never served, or computed nonsense.
        """
        doubtful = not served or loss.cause is LossCause.UNSOUND
        if self._server is not None and (doubtful or self._server.lost.done()):
            await self._server.discard()
            self._server = self._new_server()  # before the pause, so that it imports meanwhile

    async def close(self, *, sleeps: bool = False) -> None:
        """See `EngineFactory.close`. The fork server holds no memory of the model, and starts as fast as it."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    def _new_server(self) -> RankServer:
        return self._make_server(self._command, thread_environment(self._spec), self._spec.nice)
