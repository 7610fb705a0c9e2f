"""The adapters that operators deploy: stored, then told to nodes."""

from __future__ import annotations

import structlog

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.orchestrator.deploying.store_writes import StoreWrites
from ryzanstein.orchestrator.state.adapters import AdapterTable
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.state.stored import StateStore

log = structlog.get_logger(__name__)


class AdapterDeployments:
    """Changes the table of adapters. Cancelling a caller does not cancel its write."""

    def __init__(
        self, table: AdapterTable, catalog: Catalog, registry: Registry, store: StateStore, writes: StoreWrites
    ) -> None:
        self._table, self._catalog, self._registry = table, catalog, registry
        self._store, self._writes = store, writes

    async def deploy(self, adapter: DeployedAdapter) -> DeployedAdapter:
        """Adds or replaces an adapter; returns it with its revision when it is stored.

        Raises ALREADY_EXISTS where a model has its name, also one that a node was started with; RESOURCE_EXHAUSTED over the
        bounds.
        """
        return await self._writes.write(self._deploy(adapter))

    async def remove(self, name: str) -> None:
        """Removes an adapter; returns when that is stored. Raises NOT_FOUND when there is none."""
        await self._writes.write(self._remove(name))

    async def _deploy(self, adapter: DeployedAdapter) -> DeployedAdapter:
        if self._catalog.find(adapter.name) is not None:
            raise errors.already_exists("deployment", adapter.name)
        if any(adapter.name in {node.model, *(each.model for each in node.models)} for node in self._registry.nodes()):
            raise errors.already_exists("model", adapter.name)
        adapter = self._table.revised(adapter)
        await self._store.put_adapter(adapter)
        self._table.put(adapter)
        log.info("adapter deployed", adapter=adapter.name, model=adapter.model, path=adapter.path, revision=adapter.revision)
        return adapter

    async def _remove(self, name: str) -> None:
        self._table.require(name)
        await self._store.remove_adapter(name)
        self._table.remove(name)
        log.info("adapter removed", adapter=name)
