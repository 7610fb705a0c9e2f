"""The view that routers follow: a snapshot, then each change with the next version.

A watcher has a bounded queue. A watcher that falls behind loses its queue and gets a new snapshot,
which costs less than the changes that it missed. The first snapshot uses the same mechanism: a new
watcher has missed everything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.cluster import Deployment, Node
from ryzanstein.orchestrator.state.changes import Change, NodeChanged
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Members and deployments at one moment."""

    nodes: tuple[Node, ...]
    deployments: tuple[Deployment, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole cluster at a version. Versions of different epochs cannot be compared."""

    epoch: str
    version: int
    state: ClusterState


@dataclass(frozen=True, slots=True)
class ClusterDelta:
    """One change; its version is the last one plus 1."""

    version: int
    change: Change


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """Nothing changed. A watcher that gets these, and then none, looks for another orchestrator."""


Update = Snapshot | ClusterDelta | SignOfLife


class Watcher:
    """One reader's position in the stream of changes. Its versions count the changes that it is sent, from its snapshot's.

    `loads`: it wants to know of changes that are of a load alone, too.
    """

    def __init__(self, snapshot: Callable[[str], Snapshot], bound: int, *, loads: bool = True) -> None:
        self._snapshot = snapshot
        self._bound, self._loads = bound, loads
        self._version = 0
        self._queue: deque[Change] = deque()
        self._behind = "first"
        self.owed_sign = False
        self._wake = asyncio.Event()

    def offer(self, change: Change) -> None:
        """Queues a change, or clears the queue when it is full."""
        if not self._loads and isinstance(change, NodeChanged) and change.load_only:
            return
        if not self._behind:
            if len(self._queue) < self._bound:
                self._queue.append(change)
            else:
                self._queue.clear()
                self._behind = "overflow"
        self._wake.set()

    def wake(self) -> None:
        """Makes `woken` return."""
        self._wake.set()

    def take(self) -> Update | None:
        """Returns the next update: a snapshot when behind, else the oldest change or None."""
        if self._behind:
            cause, self._behind = self._behind, ""
            snapshot = self._snapshot(cause)
            self._version = snapshot.version
            return snapshot
        if not self._queue:
            return None
        self._version += 1
        return ClusterDelta(self._version, self._queue.popleft())

    async def woken(self) -> None:
        """Waits until something happened since the last call."""
        await self._wake.wait()
        self._wake.clear()


class WatchHub:
    """Numbers the changes and passes them to the watchers, after `open` and until `close`."""

    def __init__(
        self,
        epoch: str,
        state: Callable[[], ClusterState],
        telemetry: OrchestratorTelemetry,
        *,
        queue_bound: int,
        max_watchers: int,
    ) -> None:
        self.epoch = epoch
        self.version = 0
        self._state = state
        self._telemetry = telemetry
        self._queue_bound = queue_bound
        self._max_watchers = max_watchers
        self._watchers: dict[Watcher, None] = {}
        self._opened = False
        self._closed = False

    def publish(self, change: Change) -> None:
        """Gives the change the next version. The state from `state()` must already include it."""
        self.version += 1
        self._telemetry.changes.labels(type(change).__name__).inc()
        for watcher in self._watchers:
            watcher.offer(change)

    def show_life(self) -> None:
        """Sends each watcher a sign of life."""
        for watcher in self._watchers:
            watcher.owed_sign = True
            watcher.wake()

    def open(self) -> None:
        """Starts to serve watchers."""
        self._opened = True
        self._wake_all()

    def close(self) -> None:
        """Ends every watch with UNAVAILABLE."""
        self._closed = True
        self._wake_all()

    @contextmanager
    def watch(self, *, loads: bool = True) -> Iterator[Watcher]:
        """Yields a new watcher for the block. Raises RESOURCE_EXHAUSTED when there are too many."""
        if len(self._watchers) >= self._max_watchers:
            raise errors.RyzansteinError(
                f"too many watchers: {len(self._watchers)}, the bound is {self._max_watchers}",
                errors.Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_WATCHERS",
                {"bound": str(self._max_watchers)},
                retry_after_s=1.0,
            )
        watcher = Watcher(self._take_snapshot, self._queue_bound, loads=loads)
        self._watchers[watcher] = None
        self._telemetry.watchers.set(len(self._watchers))
        try:
            yield watcher
        finally:
            self._watchers.pop(watcher, None)
            self._telemetry.watchers.set(len(self._watchers))

    async def updates(self, *, loads: bool = True) -> AsyncIterator[Update]:
        """Yields a snapshot, then changes, forever; see `Watcher`.

        Raises UNAVAILABLE when the orchestrator stops. Cancelling it removes the watcher.
        """
        with self.watch(loads=loads) as watcher:
            while not self._closed:
                while self._opened and not self._closed and (update := watcher.take()) is not None:
                    yield update
                if watcher.owed_sign and not self._closed:
                    watcher.owed_sign = False
                    yield SignOfLife()
                if not self._closed:
                    await watcher.woken()
        raise errors.unavailable("STOPPING", "the orchestrator is stopping")

    def _take_snapshot(self, cause: str) -> Snapshot:
        self._telemetry.snapshots.labels(cause).inc()
        return Snapshot(self.epoch, self.version, self._state())

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.wake()
