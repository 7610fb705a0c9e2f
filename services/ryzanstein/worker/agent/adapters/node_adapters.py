"""The adapters of one agent: its registry, their files, and what the operator asked for before the model was there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ryzanstein.adapters import AdapterReport
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.agent.adapters.files import AdaptedModel, AdapterFiles
from ryzanstein.worker.agent.adapters.registry import AdapterRegistry, RegisteredAdapter

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    """An adapter that is to be registered. `revision` 0: the next one."""

    path: Path
    revision: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class AdapterRefusal:
    """Why a revision of an adapter is not registered."""

    revision: int
    why: str


class NodeAdapters:
    """`want` what is to be registered; `run` registers it as soon as the model's ranks were ready once.

    `refused` says why an adapter that is wanted is not registered. `on_change` is called with what to tell routers: of one that
    was added that one, and all when one was removed. `able`: the engine takes adapters at all. `on_removed` is
    called with the digest of an adapter that is no longer registered under any name. `max_bytes`: the memory for adapters.
    """

    def __init__(
        self,
        is_resident: Callable[[bytes], bool],
        on_change: Callable[[AdapterReport], None],
        on_removed: Callable[[bytes], None],
        *,
        able: bool,
        max_bytes: int,
    ) -> None:
        self.able, self._on_change, self._on_removed = able, on_change, on_removed
        self.files = AdapterFiles(max_bytes)
        self.registry = AdapterRegistry(self.files.check, is_resident)
        self.refused: dict[str, AdapterRefusal] = {}
        self.followed: tuple[bytes, str] = (b"", "")
        self._deployed: dict[str, WantedAdapter] = {}
        self._wanted: dict[str, WantedAdapter] = {}
        self._look = asyncio.Event()

    def follow(self, deployed: dict[str, WantedAdapter], version: tuple[bytes, str]) -> None:
        """Registers what is deployed, and removes what was and is no longer. `version` becomes `followed`."""
        before, self._deployed, self.followed = self._deployed, deployed, version
        if not self.able:
            return
        if gone := [name for name in before.keys() - deployed.keys() if self._remove(name)[1]]:
            log.info("adapters withdrawn", adapters=len(gone))
            self._report()
        for name, adapter in deployed.items():
            if before.get(name) != adapter:
                self.want(name, adapter)

    def want(self, name: str, adapter: WantedAdapter) -> None:
        """Has an adapter registered, in place of one of this name."""
        self._wanted[name] = adapter
        self._look.set()

    async def add(self, name: str, path: Path, *, revision: int = 0, pinned: bool = False) -> RegisteredAdapter:
        """Registers an adapter; see `AdapterRegistry.add`."""
        before = self.registry.get(name)
        added = await self.registry.add(name, path, revision=revision, pinned=pinned)
        self.refused.pop(name, None)
        if before is not None:
            self._gone(before)
        replaced = () if before is None or before.ref == added.ref else (before.ref,)
        self._on_change(AdapterReport((self.registry.report(added),), False, replaced))
        return added

    def remove(self, name: str) -> bool:
        """Withdraws an adapter. Returns False if there was none, neither registered, nor wanted, nor refused."""
        known, removed = self._remove(name)
        if removed:
            self._report()
        return known or removed

    def _remove(self, name: str) -> tuple[bool, bool]:
        """Returns whether it was wanted or refused, and whether it was registered."""
        known = self._wanted.pop(name, None) is not None
        known |= self.refused.pop(name, None) is not None
        removed = self.registry.remove(name)
        if removed is not None:
            self._gone(removed)
        return known, removed is not None

    def unserve(self, adapter: RegisteredAdapter, why: str) -> None:
        """Withdraws an adapter whose files are no longer what was registered."""
        if self.registry.get(adapter.ref.name) == adapter:
            self.remove(adapter.ref.name)
            self.refused[adapter.ref.name] = AdapterRefusal(adapter.revision, why)

    @property
    def complete(self) -> bool:
        """Whether all that is wanted is registered, or refused."""
        return not self._wanted

    def report(self) -> AdapterReport:
        """Returns all adapters. While others are still to be registered, a router must not take those for removed."""
        return AdapterReport(tuple(map(self.registry.report, self.registry)), self.complete, tuple(self.registry.replaced))

    def _report(self) -> None:
        if self.complete:
            self._on_change(self.report())

    def _gone(self, adapter: RegisteredAdapter) -> None:
        if not self.registry.with_content(adapter.ref.digest):
            self._on_removed(adapter.ref.digest)

    def ready(self, base: AdaptedModel) -> None:
        """Takes the model of ranks that are ready."""
        if self.files.base != base:
            self.files.base = base
            self._look.set()

    async def run(self) -> None:
        """Registers what is wanted, one after the other, until cancelled."""
        while True:
            await self._look.wait()
            self._look.clear()
            if self.files.base is not None:
                while self._wanted:
                    await self._register(next(iter(self._wanted)))
                self._report()

    async def _register(self, name: str) -> None:
        wanted = self._wanted[name]
        try:
            await self.add(name, wanted.path, revision=wanted.revision, pinned=wanted.pinned)
        except RyzansteinError as error:
            self.refused[name] = AdapterRefusal(wanted.revision, error.message)
            log.error("adapter refused", adapter=name, path=str(wanted.path), reason=error.reason, message=error.message)
        if name not in self._wanted:  # removed while it was read
            self.remove(name)
        if self._wanted.get(name) is wanted:  # no other one was wanted meanwhile
            del self._wanted[name]
