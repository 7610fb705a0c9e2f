"""Keeps the last view in a file, for a router that starts while the orchestrator is down."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Collection
from pathlib import Path

import structlog

from ryzanstein.files.private_files import opener, private_folder

log = structlog.get_logger(__name__)


_PAUSE_S = 1.0


class ViewCache:
    """The view's addresses in a JSON file.

    A missing or broken file is an empty view: the cache is only an aid. `keep` never waits. Start `run` as
    a task, which writes at most once a second, and call `save` after its end.
    """

    def __init__(self, path: Path, pause_s: float = _PAUSE_S) -> None:
        self._path = path
        self._pause_s = pause_s
        self._unsaved: Collection[str] | None = None
        self._changed = asyncio.Event()
        self._writing = threading.Lock()
        self._begun = self._written = 0

    def keep(self, addresses: Collection[str]) -> None:
        """Lets `save` write these addresses, unless there are others before."""
        self._unsaved = addresses
        self._changed.set()

    async def run(self) -> None:
        """Saves what is to be kept until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.save()
            await asyncio.sleep(self._pause_s)

    async def save(self) -> None:
        """Saves what is to be kept and is not saved yet."""
        addresses, self._unsaved = self._unsaved, None
        if addresses is not None:
            self._begun += 1
            await asyncio.to_thread(self._save_in_order, self._begun, sorted(addresses))

    def _save_in_order(self, number: int, addresses: list[str]) -> None:
        # The thread of a `run` that was cancelled goes on, perhaps after the one that saves the last state.
        with self._writing:
            if number > self._written:
                self._written = number
                self._save(addresses)

    async def load(self) -> frozenset[str]:
        return await asyncio.to_thread(self._load)

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
