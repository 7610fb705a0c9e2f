"""The prefix policy: a request goes to the node that recently got the longest common beginning.

If this router has not placed the beginning, the hash of the beginning decides; it gives the same
node on every router. A miss is thus spread like any other key, and is usually not a miss on the
node. The index holds only this router's own placements, a bounded number of them. It guarantees
nothing: a wrong entry costs a recomputation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity, beginning
from ryzanstein.router.choose.limits import Limit
from ryzanstein.router.choose.marks import marks
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.policy import Sticky, rendezvous


class PrefixIndex:
    """Maps each beginning to the node that got it last.

    Above `max_entries` (about 200 bytes each) it evicts the least recently placed entries.
    """

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
        """Returns the nodes that got a beginning of the prompt, longest first, each node once."""
        found = dict.fromkeys(self._nodes[mark] for mark in reversed(marks) if mark in self._nodes)
        return iter(found)


class Prefix:
    """Ranks by the longest beginning that a node recently got, then by the order of the key."""

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
