"""The page of the cluster: its figures, and who may see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from ryzanstein.cluster import Load, Node
from ryzanstein.console.cluster import ClusterWatch, document
from ryzanstein.console.history import ChartPoint, History, NodeRate, NodeRates
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.rpc.client import PLAIN
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import (
    ClusterStatus,
    Distribution,
    EngineFigures,
    NodeStatus,
    RouterFigures,
    RouterMember,
    RouterView,
)
from ryzanstein.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)


def cluster(tokens: int, queries: int = 0, hits: int = 0) -> ClusterStatus:
    figures = EngineFigures(decode_tokens=tokens, prefix_queries=queries, prefix_hits=hits)
    silent = NodeStatus(Node("old", "127.0.0.1:2"))
    routers = (RouterMember("router-0", "r:1"), RouterMember("router-1", "r:2", draining=True))
    return ClusterStatus(nodes=(NodeStatus(Node("new", "127.0.0.1:1"), figures=figures), silent), routers=routers)


def test_rates_are_differences_of_two_looks_and_other_ranks_begin_again() -> None:
    rates = NodeRates()
    assert rates.take(cluster(100), 10.0) == {"new": NodeRate()}
    assert rates.take(cluster(150, 40, 10), 12.0) == {"new": NodeRate(25.0, 0.25)}
    assert rates.take(cluster(3), 13.0)["new"].tokens_per_s is None
    assert rates.take(cluster(13), 14.0)["new"].tokens_per_s == 10.0


def test_the_page_gets_routers_and_figures() -> None:
    shown = document(cluster(7), "r:1", {"new": NodeRate(7.4, 0.25)})
    assert [(each["id"], each["draining"]) for each in shown["routers"]] == [("router-0", False), ("router-1", True)]
    new, silent = (each["figures"] for each in shown["nodes"])
    assert (new["tokens/s"], new["cache hits"], silent) == ("7", "25%", {})


def looked(tokens: dict[str, int], first: tuple[int, ...] = (), load: Load | None = None) -> ClusterStatus:
    nodes = tuple(
        NodeStatus(
            Node(name, "127.0.0.1:1", load=load or Load()), figures=EngineFigures(decode_tokens=count, waiting={0: 2, 5: 1})
        )
        for name, count in tokens.items()
    )
    figures = RouterFigures(time_to_first_token=Distribution((0.1, 0.2), first, 0.0) if first else Distribution(), waiting=3)
    return ClusterStatus(nodes=nodes, router=RouterView("router-0", figures=figures))


def test_a_history_has_ten_minutes_of_what_is_told() -> None:
    history, rates = History(), NodeRates()

    def take(status: ClusterStatus, now_s: float) -> ChartPoint:
        figures = status.router.figures
        routers = {} if figures is None else {"r:1": figures, "r:2": figures}
        return history.take(status, rates.take(status, now_s), routers, now_s, 1e9 + now_s)

    names = [f"node-{number:02}" for number in range(10)]
    take(looked(dict.fromkeys(names, 0), (0, 0, 0)), 0.0)
    point = take(looked(dict.fromkeys(names, 50), (10, 10, 10), Load(running=2, kv_blocks_used=25, kv_blocks_total=100)), 10.0)
    assert point.tokens == {**dict.fromkeys(names[:8], 5.0), "others": 10.0}
    assert point.first == (50.0, 95.0)
    assert (point.waiting, point.unaccepted, point.running) == ({"0": 20, "5": 10}, 6, 20)
    assert point.kv == dict.fromkeys(names[:8], 0.25)
    assert take(looked({}), 45.0).first is None, "of the last half minute alone"
    for second in range(46, 1000):
        take(looked({"a": second}), float(second))
    assert (len(history.points), history.points[0].at) == (601, 1e9 + 399)
    silent = take(ClusterStatus(errors={"router": "gone"}), 1000.0)
    assert silent == ChartPoint(1e9 + 1000)


class Services(
    orchestrator_pb2_grpc.OrchestratorServiceServicer,
    router_pb2_grpc.RouterServiceServicer,
    inference_pb2_grpc.InferenceServiceServicer,
):
    """An orchestrator with a node, and a router of the release before that tells its status to one key alone."""

    def ListNodes(self, request: Any, context: Any) -> orchestrator_pb2.ListNodesResponse:
        return orchestrator_pb2.ListNodesResponse(nodes=[orchestrator_pb2.Node(node_id="node-0", address="127.0.0.1:1")])

    def GetRouterStatus(self, request: Any, context: Any) -> router_pb2.GetRouterStatusResponse:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer operator":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the key may not")
        return router_pb2.GetRouterStatusResponse(router_id="router-0")

    def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse()


@pytest.fixture
def services() -> Iterator[str]:
    server, servicer = grpc.server(ThreadPoolExecutor(4)), Services()
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("key", "by_right", "nodes", "routers"),
    [("operator", True, ["node-0"], ["router-0"]), ("tenant", True, [], []), ("", False, ["node-0"], [])],
)
async def test_who_enters_a_key_sees_the_cluster_by_the_right_of_that_key(
    services: str, key: str, by_right: bool, nodes: list[str], routers: list[str]
) -> None:
    watch = ClusterWatch(services, [KeyedRouter(services, key)], PLAIN, ConsoleTelemetry(), by_right=by_right)
    looked = asyncio.Event()
    watch.add(looked, looked.set)
    async with asyncio.timeout(20):
        await looked.wait()
    watch.close()
    shown = json.loads(watch.latest)
    assert [each["id"] for each in shown["nodes"]] == nodes
    assert [each["id"] for each in shown["routers"]] == routers, "one without ListRouters is known itself"
    assert ("router" in shown["unreached"]) is not bool(routers)
