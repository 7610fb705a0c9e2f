"""The adapters that a node has told its router of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ryzanstein.adapters import MAX_ADAPTERS, NodeAdapter
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import report_from_wire


class LinkAdapters:
    """By public name. What was last known stays while the node is away.

    A report of one adapter costs the same however many there are.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, NodeAdapter] = {}
        self._num_names: dict[bytes, int] = {}
        self._replaced: dict[bytes, None] = {}

    def __iter__(self) -> Iterator[NodeAdapter]:
        return iter(self._by_name.values())

    @property
    def by_name(self) -> Mapping[str, NodeAdapter]:
        return self._by_name

    def has(self, digest: bytes) -> bool:
        """Returns whether the node answers with this content, under whatever name, or under none for a while."""
        return digest in self._num_names or digest in self._replaced

    def take(self, frame: worker.NodeAdapters) -> bool:
        """Takes a node's report. Returns whether it answers with others now, and not only has others in memory."""
        report = report_from_wire(frame)
        replaced = bool(report.replaced) or (report.whole and bool(self._replaced))
        if report.whole:
            self._replaced.clear()
        self._replaced |= dict.fromkeys(ref.digest for ref in report.replaced)
        while len(self._replaced) > MAX_ADAPTERS:
            del self._replaced[next(iter(self._replaced))]
        gone = self._by_name.keys() - {each.ref.name for each in report.adapters} if report.whole else ()
        for name in gone:
            self._drop(name)
        changed = [self._put(each) for each in report.adapters]
        return any(changed) or bool(gone) or replaced

    def _put(self, adapter: NodeAdapter) -> bool:
        before = self._by_name.get(adapter.ref.name)
        if before is None and len(self._by_name) >= MAX_ADAPTERS:
            return False
        changed = before is None or before.ref != adapter.ref
        if changed and before is not None:
            self._drop(adapter.ref.name)
        if changed:
            self._num_names[adapter.ref.digest] = self._num_names.get(adapter.ref.digest, 0) + 1
        self._by_name[adapter.ref.name] = adapter
        return changed or (before is not None and before.revision != adapter.revision)

    def _drop(self, name: str) -> None:
        digest = self._by_name.pop(name).ref.digest
        self._num_names[digest] -= 1
        if not self._num_names[digest]:
            del self._num_names[digest]

    def forget(self) -> None:
        """Forgets them all: another process has the node's name."""
        self._by_name, self._num_names, self._replaced = {}, {}, {}
