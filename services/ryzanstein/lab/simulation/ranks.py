"""A node's ranks without processes, sockets or tensors, and all that may happen to them.

Real are the agent above (node, host, supervisor, group, watchdog, slowness), the engine with its scheduler, blocks and prefix
cache, the messages with their codecs and the progress board. Simulated are processes and signals, what carries the messages,
the mathematics (`scripted_model`) and the time that a step takes. Runs on any event loop; nothing in it depends on anything
but the loop's clock and the random numbers that are handed in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from itertools import count
from signal import Signals

from ryzanstein.lab.simulation.crew import Crew, Makings
from ryzanstein.lab.simulation.rank_process import SimulatedProcess
from ryzanstein.lab.simulation.rank_profile import NodeFaults, RankProfile, StartEnd, StartFault
from ryzanstein.lab.simulation.rank_wiring import SimulatedWiring
from ryzanstein.lab.simulation.scripted_model import ScriptedModel
from ryzanstein.lab.simulation.timers import Timers
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.ranks.forking import ForkServerLost
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.process import exit_text

__all__ = ["NodeFaults", "RankProfile", "SimulatedForkServer", "SimulatedRanks", "StartEnd", "StartFault"]


class SimulatedForkServer:
    """A `source.RankServer`: ready after a while, then makes a rank in milliseconds."""

    def __init__(self, new_crew: Callable[[RankSpec], Crew], profile: RankProfile, pid: int, context: Context) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.lost: asyncio.Future[str] = loop.create_future()
        self.crew: Crew | None = None
        self._new_crew, self._profile = new_crew, profile
        self._timers = Timers(context)
        self._ready: asyncio.Future[None] = loop.create_future()
        self._processes: list[SimulatedProcess] = []
        self._timers.later(profile.server_s, self._become_ready)

    def wire(self, spec: RankSpec) -> SimulatedWiring:
        """A new group's; the ranks of the one before have ended."""
        self.crew = self._new_crew(spec)
        return self.crew.wiring

    async def fork(self, rank: int, fds: Sequence[int]) -> SimulatedProcess:
        """Waits for the server to be ready. ForkServerLost."""
        assert self.crew is not None, "wiring comes first"
        await asyncio.wait((self._ready, self.lost), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(self._profile.fork_s)
        if self.lost.done():
            raise ForkServerLost(self.lost.result())
        process = self.crew.fork(rank)
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """Kills it, and its ranks with it."""
        self.kill()
        running = [process.exited for process in self._processes if not process.exited.done()]
        if running:
            await asyncio.wait(running)

    def kill(self) -> bool:
        """False: it has ended before."""
        if self.lost.done():
            return False
        self._timers.cancel()
        self.lost.set_result(f"the fork server {exit_text(-Signals.SIGKILL)}")
        if self.crew is not None:
            self.crew.kill_all()
            self.crew.wiring.close()
        return True

    def vanish(self) -> None:
        """Its agent was killed, and so it ends, without a word."""
        self._timers.cancel()
        if self.crew is not None:
            self.crew.vanish()

    @property
    def is_over(self) -> bool:
        """Nothing of it runs."""
        return self.lost.done() and (self.crew is None or self.crew.over)

    def _become_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)


class SimulatedRanks:
    """The ranks of one node, over all restarts of its ranks and of its agent. `new_server` is what the agent is built with.

    `faults` may be changed at any time. Strokes at a rank return whether there was one to be struck. `unexpected` are
    exceptions of the engine that no fault has asked for: there should be none. Made inside the running loop; ranks run in the
    context variables of whoever makes it, their agent hears them in its own.
    """

    def __init__(self, rng: random.Random, profile: RankProfile | None = None, model: ScriptedModel | None = None) -> None:
        self.profile = profile or RankProfile()
        self.model = model or ScriptedModel.demo()
        self.faults = NodeFaults()
        self.unexpected: list[str] = []
        self._pids = count(1000)
        self._context = copy_context()
        self._makings = Makings(self.profile, self.model, self.faults, rng, self._pids, self.unexpected.append, self._context)
        self._servers: list[SimulatedForkServer] = []

    def new_server(self, command: Sequence[str], env: Mapping[str, str], nice: int) -> SimulatedForkServer:
        """A `source.NewRankServer`."""
        self._servers = [server for server in self._servers if not server.is_over]
        server = SimulatedForkServer(self._new_crew, self.profile, next(self._pids), self._context)
        self._servers.append(server)
        return server

    @property
    def running(self) -> list[int]:
        """The ranks that are alive now."""
        crew = self._crew
        return [] if crew is None else [rank.rank for rank in crew.ranks if rank.alive]

    @property
    def left(self) -> list[str]:
        """What has not ended; empty when the agent has."""
        servers = [f"fork server {server.pid}" for server in self._servers if not server.lost.done()]
        crews = [server.crew for server in self._servers if server.crew is not None]
        ranks = [f"rank {rank.rank} ({rank.process.pid})" for crew in crews for rank in crew.ranks if not rank.released]
        return servers + ranks + ["a board's descriptor" for crew in crews if not crew.wiring.closed]

    # Strokes.

    def kill(self, rank: int, number: Signals = Signals.SIGKILL) -> bool:
        """The agent sees it dying at once, ended a moment later; the other ranks end because of it."""
        return self._crew is not None and self._crew.signal(rank, number)

    def stop(self, rank: int) -> bool:
        """SIGSTOP: it does not move until `resume`."""
        return self.kill(rank, Signals.SIGSTOP)

    def resume(self, rank: int) -> bool:
        """SIGCONT."""
        return self.kill(rank, Signals.SIGCONT)

    def hang(self, rank: int) -> bool:
        """It does not come to its next collective, nor to the end of its step, but its process runs; until `unhang`."""
        return self._crew is not None and self._crew.hang(rank, True)

    def unhang(self, rank: int) -> bool:
        return self._crew is not None and self._crew.hang(rank, False)

    def crash(self, rank: int, message: str, *, unsound: bool = False) -> bool:
        """It says so (RankCrashed) and exits 1."""
        return self._crew is not None and self._crew.crash(rank, message, unsound=unsound)

    def kill_server(self) -> bool:
        """The fork server, and with it all ranks."""
        return self._servers[-1].kill() if self._servers else False

    def slow(self, rank: int, factor: float = 1.0) -> None:
        """The rank computes so many times as long, also after a restart, until it is said otherwise."""
        self.faults.slow[rank] = factor

    def out_of_memory(self, times: int = 1) -> None:
        """The next steps; `faults.steps.over_tokens` is for steps that are too large as long as it is set."""
        self.faults.steps.shortages += times

    def not_finite(self, times: int = 1) -> None:
        """A row of each of the next steps has logits that are no numbers; the ranks are sound."""
        self.faults.steps.bad_rows += times

    def fail_next_start(self, fault: StartFault) -> None:
        """One start each, in this order."""
        self.faults.starts.append(fault)

    def tamper(self, change: Callable[[StepPlan], StepPlan] | None) -> None:
        """Falsifies plans on their way to the ranks, to show that answers tell; None: no more."""
        self.faults.steps.tamper = change

    def agent_died(self) -> None:
        """The agent's process is no more, and will run nothing: its fork servers and ranks end silently. The next agent of
        this node may be made at once."""
        for server in self._servers:
            server.vanish()
        self._servers = []

    @property
    def _crew(self) -> Crew | None:
        """The latest."""
        return next((server.crew for server in reversed(self._servers) if server.crew is not None), None)

    def _new_crew(self, spec: RankSpec) -> Crew:
        return Crew(spec, self._makings)
