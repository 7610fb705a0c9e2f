"""The tables of `ryzanstein status`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ryzanstein.cli import display
from ryzanstein.cli.fitted_table import Column, FittedTable
from ryzanstein.cluster import Load, ModelReport, NodeState
from ryzanstein.survey.look import MAX_SESSIONS
from ryzanstein.survey.views import ClusterStatus, EngineView, NodeStatus

MAX_LOSSES = 12
_UNKNOWN = "-"


def node_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of nodes with their state and load."""
    table = FittedTable(
        "nodes",
        Column("node", folds=True),
        Column("state"),
        Column("model", 3, folds=True),
        Column("tp", 6),
        Column("memory", 7),
        Column("node's memory", 8),
        Column("running", 1),
        Column("waiting", 2),
        Column("KV blocks", 5),
        Column("restarts", 4),
        Column("beat", 3, folds=True),
        Column("host", 9, folds=True),
        Column("zone", 9, folds=True),
    )
    now = time.time()
    for each in view.nodes:
        node = each.node
        beat = _ago(now, node.beat_time) if node.beat_time and not each.error else each.error or _UNKNOWN
        place = (node.node_id, state_of(each), node.model or _UNKNOWN, str(node.tp or _UNKNOWN))
        where = (node.host or _UNKNOWN, node.zone or _UNKNOWN)
        table.add(*place, *memory_of(each), *_load(node.load), str(each.rank_restarts), beat, *where)
    return table


def memory_of(view: NodeStatus) -> tuple[str, str]:
    """Returns what the model takes, and what all models of the node take of its memory.

    A model that is asleep takes none.
    """
    own, node = view.report, view.node
    model = display.binary_bytes(own.memory_bytes) if own is not None and own.memory_bytes else _UNKNOWN
    if not node.plural:
        return model, "" if view.further else _UNKNOWN
    used = sum(report.memory_bytes for report in node.models if not report.asleep)
    return model, f"{display.binary_bytes(used)} / {display.binary_bytes(node.memory_bytes)}"


def _load(load: Load) -> tuple[str, str, str]:
    """Returns running, waiting and KV blocks.

    All three are unknown if there is no capacity.
    """
    if not load.capacity:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    return f"{load.running}/{load.capacity}", str(load.waiting), f"{load.kv_blocks_used}/{load.kv_blocks_total}"


def state_of(view: NodeStatus) -> str:
    """Returns the state as the orchestrator knows it.

    A node that does not answer is not shown as READY. A model without ranks because it was idle is asleep.
    """
    if view.report is not None and view.report.asleep and not view.error:
        return "asleep"
    if view.error and view.node.state is NodeState.READY:
        return "no answer"
    state = view.node.state.name
    if view.node.drain_requested:
        return f"{state} (drains)"
    return f"{state}{progress_of(view.report)}"


def progress_of(report: ModelReport | None) -> str:
    """Returns how far the loading of a model is, with a space before it; empty where nothing is known of it."""
    if report is None or report.progress is None:
        return ""
    told = report.progress
    if told.phase == "pack" and told.pack_bytes:
        return f" (pack {told.packed_bytes / told.pack_bytes:.0%})"
    return f" {told.loaded_bytes / told.total_bytes:.0%}" if told.total_bytes else f" ({told.phase})" if told.phase else ""


def router_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of routers, where there is more than the one that was asked."""
    table = FittedTable(
        "routers", Column("router", folds=True), Column("address", folds=True), Column("state"), Column("TLS", 1)
    )
    for each in view.routers if len(view.routers) > 1 else ():
        table.add(
            each.router_id, each.address or _UNKNOWN, "DRAINING" if each.draining else "READY", "yes" if each.tls else "no"
        )
    return table


def rank_table(view: ClusterStatus) -> FittedTable:
    table = FittedTable(
        "ranks",
        Column("node", folds=True),
        Column("rank"),
        Column("pid", 5),
        Column("phase", 1),
        Column("since", 2),
        Column("step", 4),
        Column("last step", 3),
        Column("memory", 4),
    )
    for each in view.nodes:
        for rank in each.ranks:
            last_step, memory = display.milliseconds(rank.last_step_s), display.binary_bytes(rank.resident_bytes)
            since = f"{rank.since_progress_s:.1f} s"
            place = (each.node.node_id, str(rank.rank), str(rank.pid))
            table.add(*place, rank.phase, since, str(rank.step), last_step, memory)
    return table


def link_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of one router's streams.

    It shows which are up, which nodes are suspected, and which breakers keep work away.
    """
    table = FittedTable(
        f"links of {view.router.router_id}",
        Column("node", folds=True),
        Column("address", 3, folds=True),
        Column("link"),
        Column("suspected", 1, folds=True),
        Column("breaker", 2),
        Column("in flight", 4),
    )
    for link in view.router.links:
        up = "up" if link.up else "down"
        suspicion = link.suspicion or _UNKNOWN
        table.add(link.node_id or f"? at {link.address}", link.address, up, suspicion, link.breaker, str(link.inflight))
    return table


def loss_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of recent losses, latest first.

    Links are as the router saw them, ranks as their nodes did.
    """
    table = FittedTable(
        f"recent losses (last {MAX_LOSSES})",
        Column("when", 1),
        Column("seen by", 2, folds=True),
        Column("what", folds=True),
        Column("cause"),
        Column("details", 3, folds=True),
    )
    now = time.time()
    for at, *row in sorted(losses_of(view), reverse=True)[:MAX_LOSSES]:
        table.add(_ago(now, float(at)), *map(str, row))
    return table


def losses_of(view: ClusterStatus) -> Iterator[tuple[float, str, str, str, str]]:
    for lost in view.router.recent_losses:
        yield lost.time, view.router.router_id, f"link to {lost.node_id}", lost.cause, f"{lost.inflight} attempts"
    for each in view.nodes:
        for loss in each.recent_losses:
            yield loss.time, each.node.node_id, f"rank {loss.rank}", loss.cause, loss.message


def engine_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of nodes whose engine is not their own, or that are a reserve."""
    table = FittedTable(
        "engines",
        Column("node", folds=True),
        Column("engine", folds=True),
        Column("continues", 1),
        Column("does not support", 2, folds=True),
        Column("reserve"),
    )
    for node_id, engine in sorted(view.engines.items()):
        if engine != EngineView():
            continues, lacks = "exactly" if engine.exact else "inexactly", ", ".join(engine.unsupported)
            table.add(node_id, engine.name or "own", continues, lacks or _UNKNOWN, "yes" if engine.reserve else "no")
    return table


def model_table(view: ClusterStatus) -> FittedTable:
    table = FittedTable("models", Column("model", folds=True), Column("context", 1), Column("ready nodes"))
    for model in view.models:
        table.add(model.name, str(model.context_length), str(model.ready_nodes))
    return table


def session_table(view: ClusterStatus) -> FittedTable:
    table = FittedTable(
        f"sessions (last {MAX_SESSIONS})", Column("session", folds=True), Column("node", 1, folds=True), Column("used")
    )
    now = time.time()
    for session in view.sessions:
        table.add(session.session_id, session.node_id, _ago(now, session.update_time))
    return table


def protection_table(view: ClusterStatus) -> FittedTable:
    """Returns the table of how each service is protected; one of an earlier release does not say."""
    table = FittedTable(
        "protection", Column("service", folds=True), Column("insecure"), Column("TLS", 1), Column("certificate", 2, folds=True)
    )
    now = time.time()
    for name, told in view.protections:
        insecure = _UNKNOWN if not told.tls else "INSECURE" if told.insecure else "no"
        left_s = told.certificate_expires - now
        until = _UNKNOWN if not told.certificate_expires else f"expires in {_span(left_s)}" if left_s > 0 else "has EXPIRED"
        table.add(name, insecure, told.tls or _UNKNOWN, until)
    return table


def _span(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"


def _ago(now: float, at: float) -> str:
    return f"{max(0.0, now - at):.1f} s ago"
