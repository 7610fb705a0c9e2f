"""The adapters that a node has told its router of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ryzanstein.adapters import MAX_ADAPTERS, NodeAdapter
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import adapters_from_wire


class LinkAdapters:
    """By public name. What was last known stays while the node is away."""

    def __init__(self) -> None:
        self._by_name: dict[str, NodeAdapter] = {}
        self._digests: frozenset[bytes] = frozenset()

    def __iter__(self) -> Iterator[NodeAdapter]:
        return iter(self._by_name.values())

    @property
    def by_name(self) -> Mapping[str, NodeAdapter]:
        return self._by_name

    def has(self, digest: bytes) -> bool:
        """Returns whether the node answers with this content, under whatever name."""
        return digest in self._digests

    def is_resident(self, digest: bytes) -> bool:
        """Returns whether it does so without loading it first."""
        return any(each.resident for each in self._by_name.values() if each.ref.digest == digest)

    def take(self, frame: worker.NodeAdapters) -> bool:
        """Takes a node's report. Returns whether there are others now, and not only others in memory."""
        found = {} if frame.whole else dict(self._by_name)
        for each in adapters_from_wire(frame):
            found[each.ref.name] = each
        before, self._by_name = self._by_name, dict(list(found.items())[:MAX_ADAPTERS])
        self._digests = frozenset(each.ref.digest for each in self)
        return {name: each.ref for name, each in before.items()} != {name: each.ref for name, each in found.items()}

    def forget(self) -> None:
        """Forgets them all: another process has the node's name."""
        self._by_name, self._digests = {}, frozenset()
