"""The tables of `status --watch`, one for each view, made from one sample of a cluster.

No cell changes while what it tells does not: an age is a time, or a word, so that a row that stands still is not painted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from ryzanstein.cli import display
from ryzanstein.cli.status.status_tables import losses_of, memory_of, state_of
from ryzanstein.cli.watch.recall import age_of
from ryzanstein.cli.watch.table import Tone, WatchCell, WatchColumn, WatchRow, WatchTable, cell, lettered, number
from ryzanstein.cli.watch.trends import CLUSTER, Trend, Trends
from ryzanstein.cluster import NodeState
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import ClusterStatus, LinkView, NodeStatus, RankView

ROUTER, ORCHESTRATOR = "router", "orchestrator"
_FRESH_S = 6.0  # longer than a sample takes while services are silent
_AT_REST = frozenset({"idle", "profile"})
_TONES: Mapping[str, Tone] = MappingProxyType(
    {"READY": "good", "asleep": "", "STARTING": "warn", "RECOVERING": "warn", "FAILED": "bad", "no answer": "bad"}
)

_NODES = lettered(
    WatchColumn("node", folds=True),
    WatchColumn("state"),
    WatchColumn("model", 3, folds=True),
    WatchColumn("tp", 6),
    WatchColumn("memory", 7),
    WatchColumn("node memory", 8),
    WatchColumn("running", 1),
    WatchColumn("waiting", 2),
    WatchColumn("KV blocks", 5),
    WatchColumn("restarts", 4),
    WatchColumn("load", 9, chart=True),
    WatchColumn("beat", 3),
)
_RANKS = lettered(
    WatchColumn("node", folds=True),
    WatchColumn("rank"),
    WatchColumn("pid", 5),
    WatchColumn("phase", 1),
    WatchColumn("still", 2),
    WatchColumn("step", 4),
    WatchColumn("last step", 3),
    WatchColumn("memory", 4),
)
_MODELS = lettered(
    WatchColumn("model", folds=True),
    WatchColumn("context", 3),
    WatchColumn("ready nodes"),
    WatchColumn("running", 1),
    WatchColumn("waiting", 2),
    WatchColumn("tokens/s", 4),
    WatchColumn("load", 5, chart=True),
)
_ROUTERS = lettered(
    WatchColumn("service", folds=True),
    WatchColumn("link of", 5, folds=True),
    WatchColumn("address", 3, folds=True),
    WatchColumn("state"),
    WatchColumn("suspected", 1, folds=True),
    WatchColumn("breaker", 2),
    WatchColumn("in flight", 4),
)
_GENERATIONS = lettered(
    WatchColumn("node", folds=True),
    WatchColumn("model", 3, folds=True),
    WatchColumn("running"),
    WatchColumn("waiting", 1),
    WatchColumn("in flight", 4),
    WatchColumn("tokens/s", 2),
    WatchColumn("load", 5, chart=True),
)
_LOSSES = lettered(
    WatchColumn("when", 1),
    WatchColumn("seen by", 2, folds=True),
    WatchColumn("what", folds=True),
    WatchColumn("cause"),
    WatchColumn("details", 3, folds=True),
)
_PROBLEMS = lettered(WatchColumn("problem", folds=True))


def node_rows(view: ClusterStatus, trends: Trends, now: float) -> WatchTable:
    return WatchTable("nodes", _NODES, tuple(_node_row(each, trends, now) for each in view.nodes))


def _node_row(each: NodeStatus, trends: Trends, now: float) -> WatchRow:
    node, state = each.node, state_of(each)
    memory, all_memory = memory_of(each)
    cells = (
        cell(node.node_id),
        cell(state, tone=_TONES.get(state, "warn"), stale="no answer" if state in ("READY", "asleep") else ""),
        cell(node.model),
        number(node.tp or None),
        number(each.report.memory_bytes if each.report is not None else None, memory),
        cell(all_memory),
        *_load(each),
        number(each.rank_restarts),
        _load_chart(trends.of(("node", node.node_id))),
        _beat(each, now),
    )
    heard = node.beat_time
    return WatchRow(node.node_id, cells, owner_of(each), owner_of(each), node.model, bool(each.error), heard)


def owner_of(each: NodeStatus) -> str:
    """Returns the node's own id, also of one of its further models."""
    return each.node.node_id.partition("/")[0] if each.further else each.node.node_id


def node_named(view: ClusterStatus, name: str) -> str:
    """Returns the node that a router or a loss names, perhaps with one of its further models."""
    return next((owner_of(each) for each in view.nodes if each.node.node_id == name), name.partition("/")[0])


def _load(each: NodeStatus) -> tuple[WatchCell, WatchCell, WatchCell]:
    load = each.node.load
    if not load.capacity:
        return number(None), number(None), number(None)
    running = number(load.running, f"{load.running}/{load.capacity}")
    return running, number(load.waiting), number(load.kv_blocks_used, f"{load.kv_blocks_used}/{load.kv_blocks_total}")


def _load_chart(trend: Trend) -> WatchCell:
    return WatchCell("", trend.shares[-1] if trend.shares else None, "", tuple(trend.shares))


def _beat(each: NodeStatus, now: float) -> WatchCell:
    """Returns `now` while beats come: a row whose node is well does not change each second."""
    if not each.node.beat_time:
        return number(None)
    since = max(0.0, now - each.node.beat_time)
    return WatchCell("now", 0, stale="-") if since < _FRESH_S else WatchCell(f"{age_of(since)} ago", int(since), stale="-")


def rank_rows(view: ClusterStatus, _: Trends, now: float) -> WatchTable:
    del now
    rows = (_rank_row(each, rank) for each in view.nodes for rank in each.ranks)
    return WatchTable("ranks", _RANKS, tuple(rows))


def _rank_row(each: NodeStatus, rank: RankView) -> WatchRow:
    name, owner = each.node.node_id, owner_of(each)
    still = rank.phase not in _AT_REST and rank.since_progress_s >= 1.0
    cells = (
        cell(name),
        number(rank.rank),
        number(rank.pid),
        cell(rank.phase, tone="bad" if still else ""),
        number(int(rank.since_progress_s), age_of(rank.since_progress_s)) if still else number(0, "no"),
        number(rank.step),
        number(rank.last_step_s, display.milliseconds(rank.last_step_s)),
        number(rank.resident_bytes, display.binary_bytes(rank.resident_bytes)),
    )
    return WatchRow(f"{name} {rank.rank}", cells, owner, owner, each.node.model)


def model_rows(view: ClusterStatus, trends: Trends, now: float) -> WatchTable:
    del now
    rows = []
    for model in view.models:
        loads = [each.node.load for each in view.nodes if each.node.model == model.name and not each.error]
        trend = trends.of(("model", model.name))
        cells = (
            cell(model.name),
            number(model.context_length),
            WatchCell(str(model.ready_nodes), model.ready_nodes, "good" if model.ready_nodes else "bad"),
            number(sum(load.running for load in loads)),
            number(sum(load.waiting for load in loads)),
            _rate(trend),
            _load_chart(trend),
        )
        rows.append(WatchRow(model.name, cells, ROUTER, "", model.name))
    return WatchTable("models", _MODELS, tuple(rows))


def _rate(trend: Trend) -> WatchCell:
    rate = trend.tokens_per_s
    return number(None) if rate is None else number(rate, f"{rate:.0f}")


def router_rows(view: ClusterStatus, _: Trends, now: float) -> WatchTable:
    """Returns a row for each router that is known, and for each link of the one that is asked."""
    del now
    return WatchTable("routers", _ROUTERS, (*_routers(view), *(_link_row(view, link) for link in view.router.links)))


def _routers(view: ClusterStatus) -> Iterator[WatchRow]:
    """Yields a row for each router: those that the survey lists, or the one that was asked."""
    known = {router.router_id for router in view.routers}
    for router in view.routers:
        state = "draining" if router.draining else "serves"
        yield _router_row(router.router_id, router.address, state, view)
    if ROUTER not in view.errors and view.router.router_id not in known:
        yield _router_row(view.router.router_id, "", "serves", view)


def _router_row(router_id: str, address: str, state: str, view: ClusterStatus) -> WatchRow:
    asked = router_id == view.router.router_id
    inflight = number(sum(link.inflight for link in view.router.links)) if asked else number(None)
    tone: Tone = "warn" if state == "draining" else "good"
    cells = (cell(router_id), cell(""), cell(address), cell(state, tone=tone), cell(""), cell(""), inflight)
    return WatchRow(f"{router_id} 0", cells, ROUTER)


def _link_row(view: ClusterStatus, link: LinkView) -> WatchRow:
    router_id = view.router.router_id
    name = link.node_id or f"? at {link.address}"
    cells = (
        cell(name),
        cell(router_id),
        cell(link.address),
        cell("up", tone="good") if link.up else cell("down", tone="bad"),
        cell(link.suspicion, tone="warn"),
        cell(link.breaker, tone="" if link.breaker == "closed" else "bad"),
        number(link.inflight),
    )
    return WatchRow(f"{router_id} 1 {link.node_id} {link.address}", cells, ROUTER, node_named(view, link.node_id))


def generation_rows(view: ClusterStatus, trends: Trends, now: float) -> WatchTable:
    """Returns how many generations run where: no service lists them one by one."""
    del now
    inflight: dict[str, int] = {link.node_id: link.inflight for link in view.router.links}
    rows = []
    for each in view.nodes:
        running, waiting, _ = _load(each)
        name = each.node.node_id
        trend = trends.of(("node", name))
        cells = (
            cell(name),
            cell(each.node.model),
            running,
            waiting,
            number(inflight.get(name)),
            _rate(trend),
            _load_chart(trend),
        )
        owner = owner_of(each)
        row = WatchRow(name, cells, owner, owner, each.node.model, bool(each.error), each.node.beat_time)
        rows.append(row)
    return WatchTable("generations", _GENERATIONS, tuple(rows))


def loss_rows(view: ClusterStatus, _: Trends, now: float) -> WatchTable:
    """Returns all reported losses. Their age is that of the loss, also where the service that reported it is silent now."""
    del now
    rows = []
    for at, seen_by, what, cause, details in losses_of(view):
        when = WatchCell(clock(at), at)
        name = what.removeprefix("link to ") if what.startswith("link to ") else seen_by
        cells = (when, cell(seen_by), cell(what), cell(cause, tone="bad"), cell(details))
        source = ROUTER if seen_by == view.router.router_id else node_named(view, seen_by)
        rows.append(WatchRow(f"{at} {seen_by} {what}", cells, source, node_named(view, name)))
    return WatchTable("losses", _LOSSES, tuple(rows), 0, falling=True)


def clock(unix_s: float) -> str:
    """Returns the time of day, UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%SZ")


def problem_rows(view: ClusterStatus, _: Trends, now: float) -> WatchTable:
    """Returns all problems, the worst first."""
    del now
    rows = [WatchRow(f"{at} {text}", (WatchCell(cell(text).text, at, "bad"),)) for at, text in enumerate(problems(view))]
    return WatchTable("problems", _PROBLEMS, tuple(rows))


VIEWS: Mapping[str, tuple[str, Callable[[ClusterStatus, Trends, float], WatchTable]]] = MappingProxyType(
    {
        "nodes": ("1", node_rows),
        "ranks": ("2", rank_rows),
        "models": ("3", model_rows),
        "routers": ("4", router_rows),
        "generations": ("5", generation_rows),
        "losses": ("6", loss_rows),
        "problems": ("0", problem_rows),
    }
)
"""The views by name: the key of each, and what makes its table."""


def silent_sources(view: ClusterStatus, known: Collection[str]) -> set[str]:
    """Returns the services that do not answer. `known` are nodes that were seen before: one that nobody names is silent too."""
    answering = {owner_of(each) for each in view.nodes if not each.error}
    return set(view.errors) | (set(known) - answering)


def totals(view: ClusterStatus, trends: Trends, known: Collection[str]) -> str:
    """Returns what the whole cluster does, in a few words. `known` are all nodes, also those that nobody names now."""
    nodes = [each for each in view.nodes if not each.further]
    ready = sum(each.node.state is NodeState.READY and not each.error and not each.node.drain_requested for each in nodes)
    loads = [each.node.load for each in view.nodes if not each.error]
    running, capacity = sum(load.running for load in loads), sum(load.capacity for load in loads)
    waiting, rate = sum(load.waiting for load in loads), trends.of(CLUSTER).tokens_per_s
    speed = "" if rate is None else f", {rate:.0f} tokens/s"
    if (first_s := trends.first_token_s(0.5)) is not None:
        speed += f", first token {display.milliseconds(first_s)}"
    return f"{ready}/{len(known)} nodes ready, {running}/{capacity} run, {waiting} wait{speed}"
