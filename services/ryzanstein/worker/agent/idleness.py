"""Models that sleep: ranks are unloaded when a model is idle, and loaded again for the next attempt."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from ryzanstein.worker.agent.versions.model_versions import ModelVersions
from ryzanstein.worker.agent.versions.version import ModelVersion
from ryzanstein.worker.telemetry import WorkerTelemetry


class MemoryToWake(Protocol):
    """Where a model that sleeps gets memory when it wakes, and gives it back; see `memory`."""

    async def take(self) -> None: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


class Idleness:
    """Puts a model to sleep and wakes it. It sleeps after `unload_s` without work; 0: never."""

    def __init__(self, versions: ModelVersions, telemetry: WorkerTelemetry) -> None:
        self.unload_s = 0.0
        self.room: MemoryToWake | None = None
        self._versions, self._telemetry = versions, telemetry
        self._waking: dict[ModelVersion, asyncio.Task[None]] = {}
        self._busy_s = time.monotonic()

    @property
    def rested_s(self) -> float:
        """Seconds without work so far."""
        return 0.0 if self._versions.num_running else time.monotonic() - self._busy_s

    def keep_awake(self) -> None:
        """Ends its sleeping for good: what is still waking gets no memory."""
        if self.room is not None:
            self.room.close()
        self.unload_s, self.room = 0.0, None

    def look(self) -> None:
        """Puts the model to sleep when nothing ran for `unload_s`. Called with each beat."""
        if self._versions.num_running or self._versions.serving.host.serving is None:
            self._busy_s = time.monotonic()
        elif 0 < self.unload_s <= self.rested_s:
            self._telemetry.background.once("sleep", self.sleep())

    async def sleep(self) -> None:
        """Unloads the ranks of a model that is idle; the next attempt loads them again."""
        if self._versions.num_running == 0:
            host = self._versions.serving.host
            await host.sleep()
            if self.room is not None and host.asleep and not host.waking:
                self.room.give_back()

    async def wake(self, version: ModelVersion) -> None:
        """Returns when the version's ranks serve or have failed to start, at once if they do not sleep.

        Attempts at the same time wait for the same start. It goes on when they are cancelled: half
        of it would leave memory taken.
        """
        if not version.host.asleep:
            return
        if version not in self._waking:
            self._telemetry.wakeups.inc()
            self._waking[version] = self._telemetry.background.once("wake", self._start_again(version))
            self._waking[version].add_done_callback(lambda _: self._waking.pop(version))
        await asyncio.shield(self._waking[version])

    async def _start_again(self, version: ModelVersion) -> None:
        if self.room is not None:
            await self.room.take()
        await version.host.wake()
