"""What the cluster says of itself, once a second while somebody looks at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from ryzanstein.client import clean
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import written
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.look import look
from ryzanstein.survey.problems import problems
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus, EngineFigures, LinkView, NodeStatus, RankView

LOOK_S = 1.0
_MOST_NODES = 200
_MOST_LOSSES = 10


class NodeRates:
    """What each node did between two looks: tokens a second, and which share of its prompts it had already computed."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, EngineFigures]] = {}

    def take(self, status: ClusterStatus, now_s: float) -> dict[str, dict[str, str]]:
        """Returns the figures of the nodes that tell counts, by the names of nodes. `now_s` is monotonic."""
        told = {each.node.node_id: each.figures for each in status.nodes if each.figures is not None}
        found = {name: self._of(name, figures, now_s) for name, figures in told.items()}
        self._before = {name: (now_s, figures) for name, figures in told.items()}
        return found

    def _of(self, name: str, figures: EngineFigures, now_s: float) -> dict[str, str]:
        before_s, before = self._before.get(name, (now_s, figures))
        made, seconds = figures.decode_tokens - before.decode_tokens, now_s - before_s
        rate = f"{made / seconds:.0f}" if seconds > 0 and made >= 0 else ""  # less: its ranks are others
        hits = f"{figures.prefix_hits / figures.prefix_queries:.0%}" if figures.prefix_queries else ""
        return {"tokens/s": rate, "cache hits": hits}


class ClusterWatch:
    """The state of the cluster for those who look at it. Where the first router does not answer, the next one is asked.

    The orchestrator and nodes are asked with the certificate of the console. `by_right`: what they say is shown only while a
    router tells its status to the key of the person who looks.
    """

    def __init__(
        self,
        orchestrator: str,
        routers: Sequence[KeyedRouter],
        dialer: Dialer,
        telemetry: ConsoleTelemetry,
        *,
        by_right: bool = False,
    ) -> None:
        self._by_right = by_right
        self._orchestrator, self._routers, self._dialer = orchestrator, list(routers), dialer
        self._telemetry, self._rates = telemetry, NodeRates()
        self._watchers: dict[object, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.version = 0
        self.latest = b""

    def add(self, watcher: object, wake: Callable[[], None]) -> None:
        """Looks at the cluster for somebody, and wakes them when there is something new."""
        self._watchers[watcher] = wake
        if self._task is None or self._task.done():
            self._task = self._telemetry.background.supervise("cluster", self._run, finite=True)

    def remove(self, watcher: object) -> None:
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        self._watchers.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._watchers:
            router = self._routers[0]
            status = await look(self._orchestrator, router, self._dialer)
            if "router" in status.errors:
                self._routers.append(self._routers.pop(0))
                if self._by_right:
                    status = ClusterStatus(errors={"router": status.errors["router"]})
            self.version += 1
            self.latest = written(document(status, router.address, self._rates.take(status, time.monotonic())))
            for wake in list(self._watchers.values()):
                wake()
            await asyncio.sleep(LOOK_S)


def document(status: ClusterStatus, router: str, figures: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Returns the state for the page."""
    losses = [
        {"time": each.time, "node": clean(each.node_id), "cause": clean(each.cause), "inflight": each.inflight}
        for each in status.router.recent_losses[-_MOST_LOSSES:]
    ]
    return {
        "t": "cluster",
        "router": clean(status.router.router_id) or router,
        "asked": router,
        "problems": [clean(each) for each in problems(status)],
        "unreached": {name: clean(why) for name, why in status.errors.items()},
        "nodes": [_node(each, figures) for each in status.nodes[:_MOST_NODES]],
        "more_nodes": max(0, len(status.nodes) - _MOST_NODES),
        "routers": [
            {"id": clean(each.router_id), "address": clean(each.address), "draining": each.draining} for each in status.routers
        ],
        "links": [_link(each) for each in status.router.links[:_MOST_NODES]],
        "models": [
            {"name": clean(each.name), "context": each.context_length, "ready": each.ready_nodes} for each in status.models
        ],
        "losses": losses,
    }


def _node(each: NodeStatus, figures: dict[str, dict[str, str]]) -> dict[str, Any]:
    node, engine = each.node, each.engine
    return {
        "id": clean(node.node_id),
        "address": node.address,
        "state": node.state.name.lower(),
        "reason": clean(each.reason),
        "error": clean(each.error),
        "model": clean(node.model),
        "context": node.context_length,
        "draining": node.drain_requested,
        "further": each.further,
        "engine": clean(engine.name) or "own",
        "restarts": each.rank_restarts,
        "ranks": [_rank(rank) for rank in each.ranks],
        "losses": [
            {"time": loss.time, "rank": loss.rank, "cause": clean(loss.cause), "message": clean(loss.message)[:500]}
            for loss in each.recent_losses[-_MOST_LOSSES:]
        ],
        "figures": figures.get(node.node_id, {}),
    }


def _rank(rank: RankView) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "phase": clean(rank.phase),
        "step": rank.step,
        "still_s": round(rank.since_progress_s, 2),
        "step_ms": round(rank.last_step_s * 1e3, 2),
        "bytes": rank.resident_bytes,
    }


def _link(link: LinkView) -> dict[str, Any]:
    return {
        "node": clean(link.node_id or link.address),
        "up": link.up,
        "breaker": link.breaker,
        "suspicion": clean(link.suspicion),
        "inflight": link.inflight,
        "failure": clean(link.failure),
    }
