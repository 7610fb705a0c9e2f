"""The members of the cluster and their leases: which nodes are here, and what each reported last.

Plain Python on injected clocks, for one thread. Every change is published at once, except loads:
those wait for `publish_loads`, so that many beating nodes cost watchers little. The registry knows
neither gRPC nor watchers nor the store.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from ryzanstein import errors
from ryzanstein.cluster import ModelReport, Node, NodeReport, NodeState
from ryzanstein.orchestrator.state.changes import NodeChanged, NodeLeft, Publish

# Functions of a node and of a report of a model, without copies of them: every beat is compared with the one before.
_steady = attrgetter(*(each.name for each in fields(Node) if each.name not in ("load", "beat_time", "models")))
_steady_report = attrgetter(*(each.name for each in fields(ModelReport) if each.name not in ("load", "memory_bytes")))


@dataclass(frozen=True, slots=True)
class Member:
    """A node with its lease. `displaced` is the incarnation that this one replaced, or empty."""

    node: Node
    lease_id: str
    renewed_at: float
    sequence: int = 0
    displaced: str = ""


class Registry:
    """The members: join, beat, drain, leave, expire.

    `monotonic` times leases, `wall` is what people read, both in seconds.
    """

    def __init__(
        self,
        publish: Publish,
        *,
        lease_s: float,
        max_nodes: int,
        drains: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._publish = publish
        self._lease_s = lease_s
        self._max_nodes = max_nodes
        self._monotonic = monotonic
        self._wall = wall
        # In the order of the last renewal. All leases have one length, so the first expires next.
        self._members: OrderedDict[str, Member] = OrderedDict()
        # Drain requests by node id, each for one incarnation: a drained node that was restarted is
        # wanted.
        self._drains = dict(drains or {})
        self._unpublished: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def incarnation(self, node_id: str) -> str | None:
        """Returns the incarnation of the member with this id; None when there is none."""
        member = self._members.get(node_id)
        return None if member is None else member.node.incarnation

    def find(self, node_id: str) -> Node | None:
        """Returns the member with this id; None when there is none."""
        member = self._members.get(node_id)
        return None if member is None else member.node

    @property
    def drains(self) -> dict[str, str]:
        """Drain requests: node id to the incarnation that they are for.

        Kept when a lease expires, because the node may come back.
        """
        return dict(self._drains)

    def nodes(self) -> tuple[Node, ...]:
        """Returns the members. May be called from any thread."""
        return tuple(member.node for member in list(self._members.values()))

    def node_ids(self) -> frozenset[str]:
        return frozenset(self._members)

    def join(self, node: Node) -> str:
        """Adds or renews a node and returns its new lease id. Its previous lease becomes void.

        A new incarnation replaces the old one. Raises RESOURCE_EXHAUSTED when the cluster is full.
        Raises FAILED_PRECONDITION for an incarnation that was replaced while its successor lives,
        so that two processes with one name do not evict each other.
        """
        current = self._members.get(node.node_id)
        self._admit(node, current)
        if self._drains.get(node.node_id) != node.incarnation:
            self._drains.pop(node.node_id, None)
        now = self._wall()
        joined = replace(
            node,
            state=node.state or NodeState.STARTING,
            drain_requested=node.node_id in self._drains,
            join_time=now,
            beat_time=now,
        )
        displaced = ""
        if current is not None and current.node.incarnation == node.incarnation:
            joined, displaced = _renewed(current.node, node, joined), current.displaced
        elif current is not None:
            displaced = current.node.incarnation
        member = Member(joined, uuid.uuid4().hex, self._monotonic(), displaced=displaced)
        self._renew(member)
        self._announce(joined)
        return member.lease_id

    def beat(self, node_id: str, lease_id: str, report: NodeReport) -> Node:
        """Renews the lease, applies the node's report and returns the node.

        A report without a beat, or with one older than the last, only renews. Raises NOT_FOUND when the lease is unknown, void
        or expired.
        """
        member = self._held(node_id, lease_id)
        node, sequence = member.node, member.sequence
        if report.beat is not None and report.beat.sequence >= sequence:
            node, sequence = _reported(node, report, self._wall()), report.beat.sequence
        self._renew(Member(node, lease_id, self._monotonic(), sequence, member.displaced))
        if _of_reports(node) != _of_reports(member.node):  # most beats of an idle node say nothing new
            self._note(member.node, node)
        return node

    def drain(self, node_id: str) -> Node:
        """Records a request that a node drains. Raises NOT_FOUND when it is not a member."""
        member = self._members.get(node_id)
        if member is None:
            raise errors.not_found("node", node_id)
        self._drains.pop(node_id, None)
        self._drains[node_id] = member.node.incarnation
        while len(self._drains) > self._max_nodes:
            del self._drains[next(iter(self._drains))]
        if not member.node.drain_requested:
            self._members[node_id] = replace(member, node=replace(member.node, drain_requested=True))
            self._announce(self._members[node_id].node)
        return self._members[node_id].node

    def undrain(self, node_id: str) -> Node:
        """Withdraws the request. Raises NOT_FOUND when the node is not a member."""
        member = self._members.get(node_id)
        if member is None:
            raise errors.not_found("node", node_id)
        self._drains.pop(node_id, None)
        if member.node.drain_requested:
            self._members[node_id] = replace(member, node=replace(member.node, drain_requested=False))
            self._announce(self._members[node_id].node)
        return self._members[node_id].node

    def leave(self, node_id: str, lease_id: str) -> None:
        """Removes a node and its drain request at once. Raises NOT_FOUND as `beat` does."""
        self._held(node_id, lease_id)
        self._drains.pop(node_id, None)
        self._remove(node_id)

    def expire(self) -> list[str]:
        """Removes the nodes whose leases expired and returns their ids."""
        ended = self._monotonic() - self._lease_s
        gone: list[str] = []
        for node_id, member in self._members.items():
            if member.renewed_at > ended:
                break
            gone.append(node_id)
        for node_id in gone:
            self._remove(node_id)
        return gone

    def forgive(self) -> None:
        """Restarts every lease, after this process stood still and could not receive beats."""
        now = self._monotonic()
        for node_id, member in self._members.items():
            self._members[node_id] = replace(member, renewed_at=now)

    def publish_loads(self, limit: int) -> int:
        """Publishes at most `limit` changed loads, longest waiting first; returns how many."""
        waiting = list(self._unpublished)[:limit]
        for node_id in waiting:
            del self._unpublished[node_id]
            self._publish(NodeChanged(self._members[node_id].node, load_only=True))
        return len(waiting)

    def _admit(self, node: Node, current: Member | None) -> None:
        if current is None and len(self._members) >= self._max_nodes:
            raise errors.RyzansteinError(
                f"cluster is full: {len(self._members)} nodes, the bound is {self._max_nodes}",
                errors.Code.RESOURCE_EXHAUSTED,
                "CLUSTER_FULL",
                {"bound": str(self._max_nodes)},
                retry_after_s=self._lease_s,
            )
        if current is not None and current.displaced and current.displaced == node.incarnation:
            raise errors.failed_precondition("NODE_REPLACED", f"node {node.node_id} was replaced by a newer process")

    def _held(self, node_id: str, lease_id: str) -> Member:
        member = self._members.get(node_id)
        if member is None or member.lease_id != lease_id:
            raise errors.not_found("lease", f"{node_id}/{lease_id}")
        if member.renewed_at <= self._monotonic() - self._lease_s:
            self._remove(node_id)
            raise errors.not_found("lease", f"{node_id}/{lease_id}")
        return member

    def _renew(self, member: Member) -> None:
        self._members[member.node.node_id] = member
        self._members.move_to_end(member.node.node_id)

    def _note(self, before: Node, after: Node) -> None:
        if _steady(before) != _steady(after) or not _alike(before.models, after.models):
            self._announce(after)
        elif (before.load, before.models) != (after.load, after.models):
            self._unpublished.setdefault(after.node_id)

    def _announce(self, node: Node) -> None:
        self._unpublished.pop(node.node_id, None)
        self._publish(NodeChanged(node))

    def _remove(self, node_id: str) -> None:
        del self._members[node_id]
        self._unpublished.pop(node_id, None)
        self._publish(NodeLeft(node_id))


def _renewed(known: Node, message: Node, joined: Node) -> Node:
    """Returns a node that registers again; what it does not report now is as before."""
    return replace(
        joined,
        state=message.state or known.state,
        model=message.model or known.model,
        context_length=message.context_length or known.context_length,
        load=known.load,
        join_time=known.join_time,
        models=message.models or known.models,
        memory_bytes=message.memory_bytes or known.memory_bytes,
    )


def _alike(before: tuple[ModelReport, ...], after: tuple[ModelReport, ...]) -> bool:
    """Returns whether reports of models differ at most in what changes with their work: load, and the memory that was seen."""
    return before == after or list(map(_steady_report, before)) == list(map(_steady_report, after))


_of_reports = attrgetter("state", "model", "context_length", "load", "models", "memory_bytes")
"""What a report sets of a node, besides its time."""


def _reported(node: Node, report: NodeReport, now: float) -> Node:
    beat = report.beat
    assert beat is not None
    return replace(
        node,
        state=beat.state,
        model=beat.model,
        context_length=beat.context_length,
        load=beat.load,
        beat_time=now,
        models=report.models,
        memory_bytes=report.memory_bytes,
    )
