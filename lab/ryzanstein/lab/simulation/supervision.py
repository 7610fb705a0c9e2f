"""Restarts of ended services: as a supervisor like Kubernetes does, or as `ryzanstein up` does."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import cast

from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.cli.up.kept_service import KeptService
from ryzanstein.lab.simulation.cluster import RESTART_S, Cluster, Service
from ryzanstein.lab.simulation.machine.process import Process

_LOOK_S = 1.0


class Restarts:
    """Restarts each service a moment after its end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.on_end.append(self._ended)

    def _ended(self, service: Service, process: Process) -> None:
        if service.wanted and not self._cluster.stopping:
            # In a context without an owner: the process that killed it may have ended by then.
            self._cluster.loop.call_later(RESTART_S, self._start, service, context=Context())

    def _start(self, service: Service) -> None:
        if service.wanted and not self._cluster.stopping and not service.alive:
            service.start()


class UpsRestarts:
    """Checks as often as `ryzanstein up` does, and uses its own code to decide."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Has the same interface only: there is no process of the operating system.
        self._kept = [KeptService(cast("ServiceProcess", _Adapter(service))) for service in cluster.services]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for kept in self._kept:
                for line in kept.look(self._cluster.loop.time()):
                    self._cluster.record.say("up", line=line)


class _Adapter:
    """A simulated service with the interface of `cli.service_process.ServiceProcess`."""

    log_path = "its log"

    def __init__(self, service: Service) -> None:
        self.name = service.name
        self._service = service

    @property
    def running(self) -> bool:
        return self._service.alive or not self._service.wanted

    @property
    def ending(self) -> str:
        return "ended"

    def kill(self) -> None:
        """Does nothing: an ended simulated service leaves nothing behind."""

    def start(self) -> None:
        self._service.start()
