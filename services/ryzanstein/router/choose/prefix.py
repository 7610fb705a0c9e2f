"""The prefix policy: a request goes to the node that was lately given the longest beginning in common with it.

A request whose beginning this router has not placed goes where the hash of its beginning says, the same node on every router:
a miss is spread like any other key, and is most often no miss on the node. The index only ever holds this router's own
placements, a bounded number of them, and is no promise: a wrong entry costs a recomputation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ryzanstein.generation import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity, beginning
from ryzanstein.router.choose.limits import Limit
from ryzanstein.router.choose.marks import marks
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.policy import Sticky, rendezvous


class PrefixIndex:
    """Which node was given a beginning last. Above `max_entries` (about 200 bytes each) the least recently placed goes."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, marks: Sequence[bytes], node_id: str) -> None:
        for mark in marks:
            self._nodes[mark] = node_id
            self._nodes.move_to_end(mark)
        while len(self._nodes) > self._max_entries:
            self._nodes.popitem(last=False)

    def find(self, marks: Sequence[bytes]) -> Iterator[str]:
        """The nodes that were given a beginning of it, the longest first; each once."""
        found = dict.fromkeys(self._nodes[mark] for mark in reversed(marks) if mark in self._nodes)
        return iter(found)


class Prefix:
    """Who lately got the longest beginning, then who got a shorter one, then the order of the key."""

    keyed = True
    homing = False

    def __init__(self, name: str, limit: Limit, max_entries: int) -> None:
        self.name = name
        self.limit = limit
        self._by_key = Sticky(name, rendezvous, limit)
        self._index = PrefixIndex(max_entries)

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return Affinity(beginning(request.prompt), True, marks(request.prompt))

    def rank(self, affinity: Affinity, nodes: Sequence[NodeView]) -> list[NodeView]:
        ranked = self._by_key.rank(affinity, nodes)
        depth = {node_id: depth for depth, node_id in enumerate(self._index.find(affinity.marks))}
        return sorted(ranked, key=lambda node: depth.get(node.node_id, len(depth)))

    def placed(self, affinity: Affinity, node_id: str) -> None:
        self._index.put(affinity.marks, node_id)
