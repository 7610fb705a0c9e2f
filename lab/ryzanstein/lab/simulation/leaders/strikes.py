"""What strikes orchestrators, of which one leads, and the Redis server that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.cluster import Cluster, Service
from ryzanstein.lab.simulation.leaders.redis_server import HOST, SimulatedRedis
from ryzanstein.lab.simulation.machine.process import Process
from ryzanstein.lab.simulation.planning.plan import PlannedFault

_WHEN = ("", "arrives", "answered")
"""When a leader is stopped: at once, or when its next command reaches Redis, or is answered."""


class LeaderStrikes:
    """The faults of `LEADER_FAULTS`. Each method returns when its fault is over."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def leader(self, fault: PlannedFault) -> Service:
        """Returns the orchestrator that leads; any other while none does."""
        for service in self._cluster.orchestrators:
            if service.process is not None and services.is_leading(service.process):
                return service
        return self._cluster.orchestrators[fault.target % len(self._cluster.orchestrators)]

    async def kill_leader(self, fault: PlannedFault) -> None:
        if (process := self.leader(fault).process) is not None:
            process.kill()

    async def end_leader(self, fault: PlannedFault) -> None:
        if (process := self.leader(fault).process) is not None:
            process.signal(15)

    async def stop_leader(self, fault: PlannedFault) -> None:
        """Stops the leader, in every second strike where it waits for Redis, and lets it go on."""
        process = self.leader(fault).process
        if process is None:
            return
        if when := _WHEN[fault.rank % len(_WHEN)]:
            await self._command(process, when)
        process.freeze()
        await asyncio.sleep(fault.lasts_s)
        process.thaw()

    async def _command(self, process: Process, when: str) -> None:
        """Returns when the process sends a command, or after a while."""
        came = asyncio.get_running_loop().create_future()

        def notify(client: Process, stage: str) -> None:
            if client is process and stage == when and not came.done():
                process.freeze()
                came.set_result(None)

        redis = self._redis
        redis.on_command.append(notify)
        try:
            async with asyncio.timeout(2.0):
                await came
        except TimeoutError:
            return
        finally:
            redis.on_command.remove(notify)

    async def cut_redis(self, fault: PlannedFault) -> None:
        """Cuts Redis from the leader, from those that stand by, or from all."""
        leader, all_of_them = self.leader(fault), self._cluster.orchestrators
        others = [each for each in all_of_them if each is not leader]
        cut = ([leader], others, all_of_them)[fault.rank % 3]
        await self._cut(fault, ((each.name, HOST) for each in cut))

    async def cut_leader(self, fault: PlannedFault) -> None:
        """Cuts the leader from all nodes, from half of them, or from them and Redis."""
        leader, nodes = self.leader(fault), [each.name for each in self._cluster.nodes]
        cut = (nodes, nodes[::2], [*nodes, HOST])[fault.rank % 3]
        await self._cut(fault, ((leader.name, each) for each in cut))

    async def _cut(self, fault: PlannedFault, pairs: Iterable[tuple[str, str]]) -> None:
        """Cuts paths, in every second strike both ways."""
        ways = [way for one, other in pairs for way in ((one, other), (other, one))[: 1 + fault.rank // 3 % 2]]
        for way in ways:
            self._cluster.network.cut(*way)
        await asyncio.sleep(fault.lasts_s)
        self._cluster.network.heal(*ways)

    async def redis_away(self, fault: PlannedFault) -> None:
        redis = self._redis
        redis.is_away = True
        redis.end_connections()
        await asyncio.sleep(fault.lasts_s)
        redis.is_away = False

    async def redis_slow(self, fault: PlannedFault) -> None:
        await self._while(fault, lambda share: setattr(self._redis, "slow_share", share))

    async def redis_loses(self, fault: PlannedFault) -> None:
        await self._while(fault, lambda share: setattr(self._redis, "lost_share", share))

    async def _while(self, fault: PlannedFault, put: Callable[[float], None]) -> None:
        put((0.2, 0.5, 0.9)[fault.rank % 3])
        await asyncio.sleep(fault.lasts_s)
        put(0.0)

    async def redis_forgets(self, fault: PlannedFault) -> None:
        self._redis.forget()

    async def orchestrator_clock(self, fault: PlannedFault) -> None:
        """Sets the wall clocks of an orchestrator and a node."""
        for service in (self.leader(fault), self._cluster.nodes[fault.target % len(self._cluster.nodes)]):
            service.machine.wall_offset_s += fault.lasts_s

    @property
    def _redis(self) -> SimulatedRedis:
        (redis,) = services.REDIS
        return redis
