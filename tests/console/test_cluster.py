"""The figures on the page of the cluster."""

from __future__ import annotations

from ryzanstein.cluster import Node
from ryzanstein.console.cluster import NodeRates, document
from ryzanstein.survey.views import ClusterStatus, EngineFigures, NodeStatus, RouterMember


def cluster(tokens: int, queries: int = 0, hits: int = 0) -> ClusterStatus:
    figures = EngineFigures(decode_tokens=tokens, prefix_queries=queries, prefix_hits=hits)
    silent = NodeStatus(Node("old", "127.0.0.1:2"))
    routers = (RouterMember("router-0", "r:1"), RouterMember("router-1", "r:2", draining=True))
    return ClusterStatus(nodes=(NodeStatus(Node("new", "127.0.0.1:1"), figures=figures), silent), routers=routers)


def test_rates_are_differences_of_two_looks_and_other_ranks_begin_again() -> None:
    rates = NodeRates()
    assert rates.take(cluster(100), 10.0) == {"new": {"tokens/s": "", "cache hits": ""}}
    assert rates.take(cluster(150, 40, 10), 12.0) == {"new": {"tokens/s": "25", "cache hits": "25%"}}
    assert rates.take(cluster(3), 13.0)["new"]["tokens/s"] == ""
    assert rates.take(cluster(13), 14.0)["new"]["tokens/s"] == "10"


def test_the_page_gets_routers_and_figures() -> None:
    shown = document(cluster(7), "r:1", {"new": {"tokens/s": "7"}})
    assert [(each["id"], each["draining"]) for each in shown["routers"]] == [("router-0", False), ("router-1", True)]
    assert [each["figures"] for each in shown["nodes"]] == [{"tokens/s": "7"}, {}]
