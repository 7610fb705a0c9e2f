"""Keeps the last view in a file, for a router that starts while the orchestrator is down."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection
from pathlib import Path

import structlog

from ryzanstein.files.private_files import opener, private_folder

log = structlog.get_logger(__name__)


_PAUSE_S = 1.0


class ViewCache:
    """The view's addresses in a JSON file.

    A missing or broken file is an empty view: the cache is only an aid. `keep` never waits. Start `run` as
    a task, which writes at most once a second, and call `close` after its end.
    """

    def __init__(self, path: Path, pause_s: float = _PAUSE_S) -> None:
        self._path = path
        self._pause_s = pause_s
        self._unsaved: Collection[str] | None = None
        self._changed = asyncio.Event()

    def keep(self, addresses: Collection[str]) -> None:
        """Lets `run` or `close` save these addresses, unless there are others before."""
        self._unsaved = addresses
        self._changed.set()

    async def run(self) -> None:
        """Saves what is to be kept until it is cancelled."""
        while True:
            await self._changed.wait()
            await self._save_kept()
            await asyncio.sleep(self._pause_s)

    async def close(self) -> None:
        """Saves what is not saved yet."""
        if self._unsaved is not None:
            await self._save_kept()

    async def _save_kept(self) -> None:
        addresses, self._unsaved = self._unsaved, None
        self._changed.clear()
        if addresses is not None:
            await self.save(addresses)

    async def load(self) -> frozenset[str]:
        return await asyncio.to_thread(self._load)

    async def save(self, addresses: Collection[str]) -> None:
        await asyncio.to_thread(self._save, sorted(addresses))

    def _load(self) -> frozenset[str]:
        try:
            addresses = json.loads(self._path.read_text())["addresses"]
            return frozenset(str(address) for address in addresses)
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("cached view not readable", path=str(self._path), error=str(error))
            return frozenset()

    def _save(self, addresses: list[str]) -> None:
        """Writes a second file and renames it, so that a reader never sees half a file."""
        alongside = self._path.with_suffix(".new")
        try:
            private_folder(self._path.parent)
            with open(alongside, "w", opener=opener) as file:
                json.dump({"addresses": addresses}, file)
            os.replace(alongside, self._path)
        except OSError as error:
            log.warning("view not cached", path=str(self._path), error=str(error))
