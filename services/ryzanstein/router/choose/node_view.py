"""A frozen view of a node, and whether it is usable."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.cluster import Load, NodeState


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment.

    `inflight` counts this router's own attempts there, which the last beat may not include yet.
    `admits`: its breaker lets a request through. `suspected`: it is silent, deaf, or its work does
    not move. `linked`: this router has a stream to it. `reserve`: it is for what no other node can take.
    """

    node_id: str
    model: str
    state: NodeState
    load: Load = field(default_factory=Load)
    inflight: int = 0
    admits: bool = True
    suspected: bool = False
    drain_requested: bool = False
    linked: bool = True
    reserve: bool = False

    @property
    def sequences(self) -> int:
        """The sequences that run or wait there, as far as this router knows."""
        return max(self.load.running + self.load.waiting, self.inflight)

    @property
    def waiting(self) -> int:
        return max(self.load.waiting, self.inflight - self.load.capacity if self.load.capacity else 0)

    @property
    def capacity(self) -> int:
        """The sequences that can run at once: the measure of a node's fair share.

        1 where it is unknown, so that all nodes count alike.
        """
        return max(1, self.load.capacity)

    @property
    def relative_load(self) -> float:
        return self.sequences / self.capacity

    @property
    def wanted(self) -> bool:
        """Whether it is there and serves, and nothing speaks against it but perhaps its breaker."""
        return self.linked and self.state is NodeState.READY and not self.suspected and not self.drain_requested

    @property
    def usable(self) -> bool:
        """Whether it takes new work, and nothing speaks against it."""
        return self.admits and self.wanted
