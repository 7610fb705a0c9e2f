"""The versions of a node's model: the one that serves, and earlier ones until what runs there has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from ryzanstein.cluster import Load
from ryzanstein.worker.agent.versions.version import ModelVersion

log = structlog.get_logger(__name__)


class ModelVersions:
    """All versions that have ranks or may get some. `serving` takes new generations.

    `new` returns a version without a model, to be loaded beside the one that serves. `on_change` is
    called when another version serves, and when an earlier one is gone.
    """

    def __init__(self, new: Callable[[], ModelVersion], on_change: Callable[[], None]) -> None:
        self.new = new
        self._on_change = on_change
        self.serving = new()
        self._retiring: list[ModelVersion] = []

    def __iter__(self) -> Iterator[ModelVersion]:
        """Iterates over the present versions; a version that comes or goes meanwhile changes nothing."""
        return iter((self.serving, *self._retiring))

    @property
    def num_running(self) -> int:
        """Generations that run, and inputs whose vectors are being computed."""
        return sum(version.num_running for version in self)

    @property
    def step(self) -> int:
        return sum(version.step for version in self)

    @property
    def profiled(self) -> bool:
        return any(version.profiled for version in self)

    @property
    def load(self) -> Load:
        """The load of the ranks that serve, with what still runs on earlier ones."""
        load = self.serving.load
        if not self._retiring:
            return load
        others = [version.load for version in self._retiring]
        running = load.running + sum(other.running for other in others)
        waiting = load.waiting + sum(other.waiting for other in others)
        return Load(running, waiting, load.capacity, load.kv_blocks_used, load.kv_blocks_total)

    async def switch(self, version: ModelVersion, grace_s: float) -> None:
        """Serves new generations by this version; returns when the earlier one is unloaded.

        What runs there may end within the grace; the rest fails over.
        """
        earlier, self.serving = self.serving, version
        self._retiring.append(earlier)
        self._on_change()
        try:
            async with asyncio.timeout(grace_s):
                await earlier.idle()
        except TimeoutError:
            log.warning("drain grace period expired", running=earlier.num_running)
        finally:
            await earlier.host.unload()
            self._retiring.remove(earlier)
            self._on_change()

    async def idle(self) -> None:
        """Returns when no generation runs."""
        for version in self:
            await version.idle()

    async def hand_over(self) -> None:
        """Sends the pages of recent conversations to the nodes that would go on with them."""
        for version in self:
            await version.pages.hand_over()

    async def unload(self) -> None:
        """Unloads all versions; returns when no rank is left."""
        for version in self:
            await version.host.unload()
