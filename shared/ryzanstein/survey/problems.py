"""The problems of a cluster, one line each, worst first.

The user should see them before any table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ryzanstein.cluster import NodeState
from ryzanstein.survey.views import ClusterStatus, LinkView, NodeStatus, RouterView

STILL_S = 1.0
SKEW_S = 5.0
MISSED_S = 900.0  # a node that has been gone for longer is not missed: it was removed
_AT_REST = frozenset({"idle", "profile"})


def problems(view: ClusterStatus) -> list[str]:
    """Returns the problems; empty if nothing that answered reports one."""
    found = [f"{service} does not answer: {error}" for service, error in view.errors.items()]
    if "router" not in view.errors and not any(model.ready_nodes for model in view.models):
        found.append(_nobody_ready(view))
    for node in view.nodes:
        found += _of_node(node, "orchestrator" not in view.errors)
    found += _unlinked(view.router)
    for link in view.router.links:
        found += _of_link(view.router.router_id, link)
    found += _of_certificates(view)
    return found


def _of_certificates(view: ClusterStatus) -> Iterator[str]:
    """Yields certificates of which less than a third of their life is left: they should have been renewed."""
    for name, told in view.protections:
        left_s = told.certificate_expires - time.time()
        if told.certificate_expires and left_s < told.certificate_life_s / 3:
            ends = f"expires in {left_s / 3600:.1f} hours" if left_s > 0 else f"has expired {-left_s / 3600:.1f} hours ago"
            yield f"the certificate of {name} {ends}"


def _nobody_ready(view: ClusterStatus) -> str:
    if view.nodes and all(each.node.state is NodeState.DRAINING or each.node.drain_requested for each in view.nodes):
        return "no node is ready: all nodes are draining, and every request fails with NO_NODES"
    return "no node is ready: every request waits, then fails with NO_NODES"


def _of_node(view: NodeStatus, members_known: bool) -> Iterator[str]:
    name = view.node.node_id
    if view.error:
        if not view.further:  # one line for a node
            yield f"{name} does not answer: {view.error}"
    elif view.node.state is not NodeState.READY or view.reason:
        yield f"{name} is {view.node.state.name}" + (f": {view.reason}" if view.reason else "")
    if members_known and not view.member and not view.further:
        yield f"{name} is linked but not a member: it has no lease at the orchestrator"
    if view.report is not None and view.report.next_state is NodeState.FAILED:
        yield f"{name} refused a new version of {view.report.model!r}: {view.report.next_reason}"
    for rank in view.ranks:
        if rank.phase not in _AT_REST and rank.since_progress_s >= STILL_S:
            yield f"{name} rank {rank.rank} has not moved for {rank.since_progress_s:.1f} s, in {rank.phase}"


def _unlinked(router: RouterView) -> Iterator[str]:
    """Yields links that are down, and nodes that were lost recently and are no longer linked.

    A further model of a node whose own link is up was removed: its link, `NODE/MODEL`, is not missed.
    """
    last = {loss.node_id: loss for loss in router.recent_losses if loss.time > time.time() - MISSED_S}
    linked = {link.node_id for link in router.links}
    down = {link.node_id or link.address: link.failure for link in router.links if not link.up}
    up = {link.node_id for link in router.links if link.up}
    missed = (name for name in last if name not in linked and name.partition("/")[0] not in up)
    for name in [*down, *missed]:
        causes = (last[name].cause if name in last else "", down.get(name, ""))
        why = "".join(f": {cause}" for cause in causes if cause)
        yield f"{router.router_id} has no link to {name}{why}"


def _of_link(router_id: str, link: LinkView) -> Iterator[str]:
    name = link.node_id or link.address
    if link.up and abs(link.clock_skew_s) > SKEW_S:
        way = "ahead of" if link.clock_skew_s > 0 else "behind"
        yield f"the clock of {name} is {abs(link.clock_skew_s):.0f} s {way} that of {router_id}"
    if link.suspicion:
        yield f"{router_id} suspects {name}: {link.suspicion}"
    if link.breaker != "closed":
        yield f"the breaker of {name} at {router_id} is {link.breaker.replace('_', '-')}"
