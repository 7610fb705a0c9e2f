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


class ViewCache:
    """The view's addresses in a JSON file.

    A missing or broken file is an empty view: the cache is only an aid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

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
