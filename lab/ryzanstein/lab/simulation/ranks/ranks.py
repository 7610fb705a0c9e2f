"""A node's ranks without processes, sockets or tensors, and the faults that can strike them.

Real: the agent above (node, host, supervisor, group, watchdog, slowness), the engine with its
scheduler, blocks and prefix cache, the messages with their codecs, and the progress board.
Simulated: processes and signals, message transport, the mathematics (`scripted_model`) and the
duration of a step. It runs on any event loop and depends only on the loop's clock and the random
numbers that are passed in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from itertools import count
from signal import Signals

from ryzanstein.lab.simulation.ranks.process import SimulatedProcess
from ryzanstein.lab.simulation.ranks.team.parts import TeamParts
from ryzanstein.lab.simulation.ranks.team.profile import NodeFaults, RankProfile, StartEnd, StartFault
from ryzanstein.lab.simulation.ranks.team.team import RankTeam
from ryzanstein.lab.simulation.ranks.team.timers import Timers
from ryzanstein.lab.simulation.ranks.wiring import SimulatedWiring
from ryzanstein.lab.simulation.scripted.model import ScriptedModel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServerLost
from ryzanstein.worker.ranks.starting.process import exit_text

__all__ = ["NodeFaults", "RankProfile", "SimulatedForkServer", "SimulatedRanks", "StartEnd", "StartFault"]


class SimulatedForkServer:
    """A `source.RankServer`: ready after a while, then it makes a rank in milliseconds.

    `crews` are those that it forks and those that it has forked, the latest last.
    """

    def __init__(self, new_team: Callable[[RankSpec], RankTeam], profile: RankProfile, pid: int, context: Context) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.lost: asyncio.Future[str] = loop.create_future()
        self.crews: list[RankTeam] = []
        self._new_team, self._profile = new_team, profile
        self._timers = Timers(context)
        self._ready: asyncio.Future[None] = loop.create_future()
        self._processes: list[SimulatedProcess] = []
        self._timers.later(profile.server_s, self._become_ready)

    async def prepare(self, spec: RankSpec, compiling: Callable[[], None]) -> None:
        """See `source.RankServer`. Simulated ranks have no kernels."""

    def wire(self, spec: RankSpec) -> SimulatedWiring:
        """Returns the wiring of a new group."""
        self.crews = [team for team in self.crews if not team.over]
        self.crews.append(self._new_team(spec))
        return self.crews[-1].wiring

    async def fork(self, rank: int, fds: Sequence[int]) -> SimulatedProcess:
        """Forks a rank once the server is ready. Raises ForkServerLost.

        The descriptor of its board says to which group it belongs.
        """
        team = next(team for team in self.crews if not team.wiring.closed and team.wiring.board_fd == fds[0])
        await asyncio.wait((self._ready, self.lost), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(self._profile.fork_s)
        if self.lost.done():
            raise ForkServerLost(self.lost.result())
        process = team.fork(rank)
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """Kills the server and its ranks, and waits for the ranks' end."""
        self.kill()
        running = [process.exited for process in self._processes if not process.exited.done()]
        if running:
            await asyncio.wait(running)

    async def discard(self) -> None:
        """See `source.RankServer`. This server has one user."""
        await self.close()

    def kill(self) -> bool:
        """Kills the server. Returns False if it had already ended."""
        if self.lost.done():
            return False
        self._timers.cancel()
        self.lost.set_result(f"the fork server {exit_text(-Signals.SIGKILL)}")
        for team in self.crews:
            team.kill_all()
            team.wiring.close()
        return True

    def vanish(self) -> None:
        """Ends the server without a message, because its agent was killed."""
        self._timers.cancel()
        for team in self.crews:
            team.vanish()

    @property
    def is_over(self) -> bool:
        """Returns whether the server and all its ranks have ended."""
        return self.lost.done() and all(team.over for team in self.crews)

    def _become_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)


class SimulatedRanks:
    """The ranks of one node, across all restarts of its ranks and of its agent.

    The agent is built with `new_server`. `faults` may be changed at any time. Methods that strike a
    rank return whether it was there. `unexpected` lists exceptions of the engine that no fault
    caused: there should be none. Create it inside the running loop. Ranks run in the context
    variables of the code that creates it; their agent is called in its own.
    """

    def __init__(self, rng: random.Random, profile: RankProfile | None = None, model: ScriptedModel | None = None) -> None:
        self.profile = profile or RankProfile()
        self.model = model or ScriptedModel.demo()
        self.faults = NodeFaults()
        self.unexpected: list[str] = []
        self._pids = count(1000)
        self._context = copy_context()
        self._parts = TeamParts(self.profile, self.model, self.faults, rng, self._pids, self.unexpected.append, self._context)
        self._servers: list[SimulatedForkServer] = []

    def new_server(self, command: Sequence[str], env: Mapping[str, str], nice: int) -> SimulatedForkServer:
        """Creates a fork server. This method is a `source.NewRankServer`."""
        self._servers = [server for server in self._servers if not server.is_over]
        server = SimulatedForkServer(self._new_team, self.profile, next(self._pids), self._context)
        self._servers.append(server)
        return server

    @property
    def running(self) -> list[int]:
        """Returns the ranks that are alive now."""
        team = self._team
        return [] if team is None else [rank.rank for rank in team.ranks if rank.alive]

    @property
    def left(self) -> list[str]:
        """Returns what has not ended; empty once the agent has."""
        servers = [f"fork server {server.pid}" for server in self._servers if not server.lost.done()]
        crews = [team for server in self._servers for team in server.crews]
        ranks = [f"rank {rank.rank} ({rank.process.pid})" for team in crews for rank in team.ranks if not rank.released]
        return servers + ranks + ["a board's descriptor" for team in crews if not team.wiring.closed]

    # Faults.

    def kill(self, rank: int, number: Signals = Signals.SIGKILL) -> bool:
        """Sends a signal to a rank.

        If it is killed, the agent sees it dying at once and ended a moment later; the other ranks
        end because of it.
        """
        return self._team is not None and self._team.signal(rank, number)

    def stop(self, rank: int) -> bool:
        """Sends SIGSTOP: the rank does not move until `resume`."""
        return self.kill(rank, Signals.SIGSTOP)

    def resume(self, rank: int) -> bool:
        """Sends SIGCONT."""
        return self.kill(rank, Signals.SIGCONT)

    def hang(self, rank: int) -> bool:
        """Keeps the rank from its next collective and the end of its step for good.

        Its process keeps running.
        """
        return self._team is not None and self._team.hang(rank)

    def crash(self, rank: int, message: str, *, unsound: bool = False) -> bool:
        """Makes the rank report a crash (RankCrashed) and exit with 1."""
        return self._team is not None and self._team.crash(rank, message, unsound=unsound)

    def kill_server(self) -> bool:
        """Kills the fork server, and with it all ranks."""
        return self._servers[-1].kill() if self._servers else False

    def slow(self, rank: int, factor: float = 1.0) -> None:
        """Multiplies the rank's computing time by `factor`, across restarts, until set again."""
        self.faults.slow[rank] = factor

    def out_of_memory(self, times: int = 1) -> None:
        """Makes the next steps run out of memory.

        `faults.steps.over_tokens` does the same to every step that is too large, while it is set.
        """
        self.faults.steps.shortages += times

    def not_finite(self, times: int = 1) -> None:
        """Makes each of the next steps produce logits that are not finite for one token.

        The ranks themselves are sound.
        """
        self.faults.steps.bad_rows += times

    def fail_next_start(self, fault: StartFault) -> None:
        """Queues a fault for a start. Each start uses one, in order."""
        self.faults.starts.append(fault)

    def tamper(self, change: Callable[[StepPlan], StepPlan] | None) -> None:
        """Falsifies plans on their way to the ranks, to show that answers reveal it.

        None ends this.
        """
        self.faults.steps.tamper = change

    def agent_died(self) -> None:
        """Ends all fork servers and ranks silently, because the agent's process has ended.

        The next agent of this node may be created at once.
        """
        for server in self._servers:
            server.vanish()
        self._servers = []

    @property
    def _team(self) -> RankTeam | None:
        """Returns the latest crew, if any."""
        return next((server.crews[-1] for server in reversed(self._servers) if server.crews), None)

    def _new_team(self, spec: RankSpec) -> RankTeam:
        return RankTeam(spec, self._parts)
