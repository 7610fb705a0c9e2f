"""The tables of `ryzanstein status`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.table import Table

from ryzanstein.cli import display
from ryzanstein.cli.cluster_view import ClusterView, NodeView
from ryzanstein.cli.survey import MAX_SESSIONS
from ryzanstein.cluster import NodeState

MAX_LOSSES = 12


def node_table(view: ClusterView) -> Table:
    """Members with their state and load."""
    table = Table("node", "state", "model", "tp", "running", "waiting", "KV blocks", "restarts", "beat", title="nodes")
    now = time.time()
    for each in view.nodes:
        node, load = each.node, each.node.load
        beat = _ago(now, node.beat_time) if node.beat_time and not each.error else each.error or "-"
        kv = f"{load.kv_blocks_used}/{load.kv_blocks_total}"
        running = f"{load.running}/{load.capacity}"
        table.add_row(
            node.node_id, _state(each), node.model, str(node.tp), running, str(load.waiting), kv, str(each.rank_restarts), beat
        )
    return table


def _state(view: NodeView) -> str:
    """As the orchestrator heard it; a node that is silent itself does not pass as READY."""
    if view.error and view.node.state is NodeState.READY:
        return "no answer"
    return f"{view.node.state.name} (drains)" if view.node.drain_requested else view.node.state.name


def rank_table(view: ClusterView) -> Table:
    table = Table("node", "rank", "pid", "phase", "since", "step", "last step", "memory", title="ranks")
    for each in view.nodes:
        for rank in each.ranks:
            last_step, memory = display.milliseconds(rank.last_step_s), display.binary_bytes(rank.resident_bytes)
            since = f"{rank.since_progress_s:.1f} s"
            place = (each.node.node_id, str(rank.rank), str(rank.pid))
            table.add_row(*place, rank.phase, since, str(rank.step), last_step, memory)
    return table


def link_table(view: ClusterView) -> Table:
    """One router's streams: who is there, who is suspected, who is not asked."""
    table = Table("node", "address", "link", "suspected", "breaker", "in flight", title=f"links of {view.router.router_id}")
    for link in view.router.links:
        up = "up" if link.up else "down"
        table.add_row(link.node_id or "?", link.address, up, link.suspicion or "-", link.breaker, str(link.inflight))
    return table


def loss_table(view: ClusterView) -> Table:
    """What was lost lately, last first: links as the router saw them, ranks as their nodes did."""
    table = Table("when", "seen by", "what", "cause", "details", title=f"recent losses (last {MAX_LOSSES})")
    now = time.time()
    for at, *row in sorted(_losses(view), reverse=True)[:MAX_LOSSES]:
        table.add_row(_ago(now, float(at)), *map(str, row))
    return table


def _losses(view: ClusterView) -> Iterator[tuple[float, str, str, str, str]]:
    for lost in view.router.recent_losses:
        yield lost.time, view.router.router_id, f"link to {lost.node_id}", lost.cause, f"{lost.inflight} attempts"
    for each in view.nodes:
        for loss in each.recent_losses:
            yield loss.time, each.node.node_id, f"rank {loss.rank}", loss.cause, loss.message


def model_table(view: ClusterView) -> Table:
    table = Table("model", "context", "ready nodes", title="models")
    for model in view.models:
        table.add_row(model.name, str(model.context_length), str(model.ready_nodes))
    return table


def session_table(view: ClusterView) -> Table:
    table = Table("session", "node", "used", title=f"sessions (last {MAX_SESSIONS})")
    now = time.time()
    for session in view.sessions:
        table.add_row(session.session_id, session.node_id, _ago(now, session.update_time))
    return table


def _ago(now: float, at: float) -> str:
    return f"{max(0.0, now - at):.1f} s ago"
