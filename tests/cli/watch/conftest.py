"""Clusters that a test describes, and a watch of them whose samples a test gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ryzanstein.cluster import Load, ModelReport, Node, NodeState
from ryzanstein.survey.views import (
    ClusterStatus,
    EngineFigures,
    LinkLossView,
    LinkView,
    ModelView,
    NodeStatus,
    RankLossView,
    RankView,
    RouterView,
)

NOW = float(int(time.time()))


class Scene:
    """Makes parts of a cluster."""

    NOW = NOW

    @staticmethod
    def node(
        node_id: str, running: int = 0, *, model: str = "demo", error: str = "", drained: bool = False, **more: Any
    ) -> NodeStatus:
        load = Load(running, more.pop("waiting", 0), 64, running * 3, 8192)
        state = more.pop("state", NodeState.READY)
        report = ModelReport(model, state=state, load=load, memory_bytes=2**30)
        node = Node(
            node_id,
            f"127.0.0.1:{1000 + len(node_id)}",
            tp=2,
            state=state,
            model=model,
            load=load,
            drain_requested=drained,
            beat_time=more.pop("beat_time", time.time()),
            models=(report,),
            memory_bytes=2**33,
        )
        ranks = () if error else tuple(RankView(rank, 100 + rank, "idle", 7, 0.0, 0.01, 2**28) for rank in (0, 1))
        return NodeStatus(node, ranks, more.pop("restarts", 0), error, report=report, **more)

    @staticmethod
    def cluster(*nodes: NodeStatus, errors: dict[str, str] | None = None, **more: Any) -> ClusterStatus:
        """A cluster with a router that has a link to each node; a service with an error says nothing."""
        failed = errors or {}
        links = tuple(
            LinkView(
                each.node.node_id, each.node.address, not each.error, "", "closed", each.node.load.running, NodeState.READY, ""
            )
            for each in nodes
        )
        router = RouterView() if "router" in failed else RouterView("router-0", links, more.pop("lost", ()))
        ready = sum(not each.error for each in nodes)
        models = () if "router" in failed else (ModelView("demo", 2048, ready),)
        return ClusterStatus(nodes=nodes, router=router, models=more.pop("models", models), errors=failed, **more)

    link_loss = LinkLossView
    rank_loss = RankLossView

    @classmethod
    def counting(cls, node_id: str, tokens: int) -> NodeStatus:
        """A node that says how many tokens it has generated."""
        node = cls.node(node_id, 16)
        return replace(node, figures=EngineFigures(decode_tokens=tokens))


@pytest.fixture(scope="session")
def scene() -> type[Scene]:
    return Scene


@dataclass
class Script:
    """The samples of a watch: those that a test gives, when it gives them."""

    queue: asyncio.Queue[ClusterStatus] = field(default_factory=asyncio.Queue)
    pauses: list[bool] = field(default_factory=list)

    def tell(self, status: ClusterStatus) -> None:
        self.queue.put_nowait(status)

    async def samples(self) -> AsyncIterator[ClusterStatus]:
        while True:
            yield await self.queue.get()


@pytest.fixture
def script() -> Callable[[], Script]:
    return Script
