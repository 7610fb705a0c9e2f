"""The descriptors that ranks inherit: shared memory and channels.

Each rank has a channel to the agent, and rank 0 has one to each other rank. Everything is a memfd
or a socket pair and has no name: it disappears with the last process.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.ranks.channel import AgentChannel
from ryzanstein.worker.ranks.health.board import board_bytes
from ryzanstein.worker.ranks.messages import RankMessage, RankSpec, StartRank


@dataclass(eq=False, slots=True)
class RankWires:
    """The wires of one rank.

    They are both ends of its channel to the agent, the other inherited descriptors, and its first
    message. Once connected, the agent's end belongs to its channel.
    """

    agent_end: socket.socket
    rank_end: socket.socket
    more_fds: tuple[int, ...]
    start: StartRank
    connected: bool = False

    @property
    def fds(self) -> tuple[int, ...]:
        """Returns the descriptors that the rank inherits, its channel to the agent first."""
        return (self.rank_end.fileno(), *self.more_fds)

    async def connect(self, channel: AgentChannel[RankMessage]) -> None:
        """Gives the agent's end to its channel."""
        await channel.open(self.agent_end)
        self.connected = True


class Wiring:
    """All descriptors of a group.

    As a context manager it closes them when the ranks have inherited them; otherwise the end of a
    rank would not be an end of file for the others. The agent's ends of the channels stay open until
    `close`, unless they have been connected. OSError: there are not enough descriptors; none is left.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._inherited = ExitStack()
        self.ranks: list[RankWires] = []
        try:
            self.board_fd = self._memory("board", board_bytes(spec.tp))
            self._segment_fd = self._memory("collectives", segment_bytes(spec.tp))
            self._store_fd = self._memory("store", 0)
            self._slab_fd = self._memory("slab", 0)
            plans = [self._plan() for _ in range(1, spec.tp)]
            for rank in range(spec.tp):
                ends = [lead for lead, _ in plans] if rank == 0 else [plans[rank - 1][1]]
                self.ranks.append(self._wires(spec, rank, [end.fileno() for end in ends]))
        except BaseException:
            self.close()
            raise

    def _plan(self) -> tuple[socket.socket, socket.socket]:
        lead, follower = socket.socketpair()
        return self._inherited.enter_context(lead), self._inherited.enter_context(follower)

    def _memory(self, name: str, size_bytes: int) -> int:
        fd = os.memfd_create(f"ryzanstein-{name}")
        self._inherited.callback(os.close, fd)
        os.ftruncate(fd, size_bytes)
        return fd

    def _wires(self, spec: RankSpec, rank: int, plan_fds: list[int]) -> RankWires:
        agent_end, rank_end = socket.socketpair()
        self._inherited.enter_context(rank_end)
        shared = (self.board_fd, self._segment_fd, self._store_fd, self._slab_fd)
        return RankWires(agent_end, rank_end, (*shared, *plan_fds), StartRank(rank, spec, *shared, plan_fds, time.monotonic()))

    def take_slab(self) -> int:
        """Returns a descriptor of the slab that belongs to the caller."""
        return os.dup(self._slab_fd)

    def __enter__(self) -> Wiring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inherited.close()

    def close(self) -> None:
        """Closes all that nobody has taken over."""
        self._inherited.close()
        for wires in self.ranks:
            if not wires.connected:
                wires.agent_end.close()
