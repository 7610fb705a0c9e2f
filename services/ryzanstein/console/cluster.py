"""What the cluster says of itself: once a second while somebody looks at it, and less often for a while after."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from ryzanstein.client import clean
from ryzanstein.console.history import History, NodeRate, NodeRates
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import written
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.look import look, router_figures
from ryzanstein.survey.problems import problems
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus, LinkView, NodeStatus, RankView

LOOK_S = 1.0
UNSEEN_LOOK_S = 5.0
"""Between looks while nobody watches, so that charts have no hole when somebody comes back."""
UNSEEN_S = 600.0
_MOST_NODES = 200
_MOST_LOSSES = 10


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
        self._telemetry, self._rates, self._history = telemetry, NodeRates(), History()
        self._watchers: dict[object, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        self.version = 0
        self.latest = b""

    def add(self, watcher: object, wake: Callable[[], None]) -> None:
        """Looks at the cluster for somebody, and wakes them when there is something new."""
        self._watchers[watcher] = wake
        self._came.set()
        if self._task is None or self._task.done():
            self._task = self._telemetry.background.supervise("cluster", self._run, finite=True)

    def remove(self, watcher: object) -> None:
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        self._watchers.clear()
        if self._task is not None:
            self._task.cancel()

    def history(self) -> bytes:
        """Returns the figures of the last minutes, for charts."""
        return written({"t": "history", "points": list(self._history.points)})

    async def _run(self) -> None:
        until = 0.0
        while True:
            now = time.monotonic()
            until = now + UNSEEN_S if self._watchers else until
            if now >= until:
                return
            await self._look()
            self._came.clear()
            with contextlib.suppress(TimeoutError):  # who comes is shown something at once
                await asyncio.wait_for(self._came.wait(), LOOK_S if self._watchers else UNSEEN_LOOK_S)

    async def _look(self) -> None:
        router, *others = self._routers
        status, figures = await asyncio.gather(
            look(self._orchestrator, router, self._dialer), asyncio.gather(*(router_figures(each) for each in others))
        )
        told = zip(self._routers, (status.router.figures, *figures), strict=True)
        routers = {each.address: found for each, found in told if found is not None}
        if "router" in status.errors:
            self._routers.append(self._routers.pop(0))
            if self._by_right:
                status = ClusterStatus(errors={"router": status.errors["router"]})
        now = time.monotonic()
        rates = self._rates.take(status, now)
        point = self._history.take(status, rates, routers, now, time.time())
        self.version += 1
        self.latest = written({**document(status, router.address, rates), "point": point})
        for wake in list(self._watchers.values()):
            wake()


def document(status: ClusterStatus, router: str, rates: dict[str, NodeRate]) -> dict[str, Any]:
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
        "nodes": [_node(each, rates.get(each.node.node_id, NodeRate())) for each in status.nodes[:_MOST_NODES]],
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


def _node(each: NodeStatus, rate: NodeRate) -> dict[str, Any]:
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
        "figures": _figures(each, rate),
    }


def _figures(each: NodeStatus, rate: NodeRate) -> dict[str, str]:
    """Returns the columns of a node that tells figures, by their heads."""
    load, told = each.node.load, each.figures
    if told is None:
        return {}
    return {
        "tokens/s": "" if rate.tokens_per_s is None else f"{rate.tokens_per_s:.0f}",
        "running": str(load.running),
        "waiting": ", ".join(f"{count} of class {priority}" for priority, count in sorted(told.waiting.items()) if count)
        or "0",
        "KV blocks": f"{load.kv_blocks_used} of {load.kv_blocks_total}" if load.kv_blocks_total else "",
        "hot pages": f"{told.hot_pages_held} held, {told.hot_pages_cached} idle",
        "pages sealed": str(told.pages_sealed),
        "KV lent": _mib(told.kv_bytes_lent),
        "cache hits": "" if rate.prefix_hits is None else f"{rate.prefix_hits:.0%}",
    }


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes else "0"


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
