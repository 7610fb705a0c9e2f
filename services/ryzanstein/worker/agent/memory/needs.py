"""How much memory the models in directories would take on this node, measured in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from ryzanstein.cluster import ModelNeed
from ryzanstein.errors import RyzansteinError
from ryzanstein.process.background import Background

log = structlog.get_logger(__name__)

MAX_PATHS = 64
_AGAIN_S = 10.0


class ModelNeeds:
    """A cache of needs by directory. `measure` runs in a thread.

    It returns bytes; RyzansteinError and OSError say why the directory cannot be served.
    """

    def __init__(self, measure: Callable[[Path], int], background: Background) -> None:
        self._measure, self._background = measure, background
        self._known: dict[str, tuple[float, ModelNeed]] = {}
        self._running: dict[str, asyncio.Task[ModelNeed]] = {}
        self._asked: frozenset[str] = frozenset()

    def ask(self, paths: Collection[str]) -> tuple[ModelNeed, ...]:
        """Returns the needs that are known, and starts to measure the others.

        A directory that could not be served is measured again when it is asked for anew, and from
        time to time.
        """
        now = time.monotonic()
        for path in paths:
            measured_s, need = self._known.get(path, (0.0, None))
            if need is not None and need.error and path not in self._asked:
                need = None
                del self._known[path]  # it may have been repaired since
            if need is None or (need.error and now - measured_s > _AGAIN_S):
                self._start(path)
        self._asked = frozenset(paths)
        return tuple(self._known[path][1] for path in paths if path in self._known)

    async def of(self, path: str) -> ModelNeed:
        """Measures a directory now: its files may have changed."""
        return await asyncio.shield(self._start(path))

    def known(self, path: str) -> int:
        """Returns the bytes that were last measured; 0 if unknown."""
        return self._known[path][1].bytes if path in self._known else 0

    def _start(self, path: str) -> asyncio.Task[ModelNeed]:
        running = self._running.get(path)
        if running is None:
            running = self._running[path] = self._background.once("measure", self._run(path))
        return running

    async def _run(self, path: str) -> ModelNeed:
        try:
            need = ModelNeed(path, await asyncio.to_thread(self._measure, Path(path)))
        except (RyzansteinError, OSError) as error:
            text = error.message if isinstance(error, RyzansteinError) else str(error)
            need = ModelNeed(path, error=text[:512])
        finally:
            del self._running[path]
        self._known.pop(path, None)
        while len(self._known) >= MAX_PATHS:
            del self._known[next(iter(self._known))]
        self._known[path] = (time.monotonic(), need)
        log.info("model measured", path=path, bytes=need.bytes, error=need.error)
        return need
