"""Many stand-ins for nodes: `python -P -m ryzanstein.lab.bench.control.standins.nodes ORCHESTRATOR FIRST NUMBER MODELS`.

Orders: {"do": "join" | "leave", "nodes": numbers, or null for all}, {"do": "work", "busy": bool}, {"do": "mark"}.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

from ryzanstein.lab.bench.control.standins.node import StandInHost, StandInNode
from ryzanstein.lab.bench.control.standins.orders import Order, obey
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.observe import log as logs
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics

_AT_ONCE = 32


class StandInNodes:
    """The nodes of this process, by number."""

    def __init__(self, orchestrator: str, first: int, number: int, models: tuple[str, ...]) -> None:
        self._host = StandInHost(orchestrator, ScriptedEngine(), NodeMetrics())
        self._nodes = {n: StandInNode(f"node-{n}", models, self._host) for n in range(first, first + number)}

    async def carry_out(self, order: Order) -> None:
        match order["do"]:
            case "join":
                await self._all(StandInNode.join, order["nodes"])
            case "leave":
                await self._all(StandInNode.leave, order["nodes"])
            case "work":
                for node in self._nodes.values():
                    node.work(busy=order["busy"])
            case "mark":
                for node in self._nodes.values():
                    node.rejoined = False

    async def close(self) -> None:
        await self._all(StandInNode.close, None)

    async def _all(self, act: Any, numbers: list[int] | None) -> None:
        chosen = self._nodes.values() if numbers is None else [self._nodes[n] for n in numbers if n in self._nodes]
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(node: StandInNode) -> None:
            async with places:
                await act(node)

        await asyncio.gather(*map(one, chosen))

    def state(self) -> dict[str, Any]:
        nodes = self._nodes.values()
        return {
            "registered": sum(node.registered for node in nodes),
            "rejoined": sum(node.rejoined for node in nodes),
            "links": sum(link.alive for node in nodes for link in node.links),
            "to_orchestrator": self._host.to_orchestrator.document(),
            "to_routers": self._host.to_routers.document(),
        }


async def serve(orchestrator: str, first: str, number: str, models: str) -> None:
    """Obeys until standard input ends."""
    nodes = StandInNodes(orchestrator, int(first), int(number), tuple(models.split(",")))
    try:
        await obey(nodes.carry_out, nodes.state)
    finally:
        await nodes.close()


if __name__ == "__main__":
    # Standard output is only for the state.
    logs.setup("nodes", "error")
    uvloop.run(serve(*sys.argv[1:5]))
