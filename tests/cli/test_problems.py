"""What `ryzanstein status` puts first."""

from __future__ import annotations

import io
import time
from dataclasses import replace

from rich.console import Console

from ryzanstein.cli.status.command import as_document, show
from ryzanstein.cluster import Node, NodeState
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import (
    ClusterStatus,
    LinkLossView,
    LinkView,
    ModelView,
    NodeStatus,
    OrchestratorView,
    ProtectionView,
    RankLossView,
    RankView,
    RouterView,
)

READY = Node("node-0", "10.0.0.1:50061", state=NodeState.READY)
IDLE = RankView(0, 7, "idle", 3, 90.0, 0.01, 2**20)
FINE = LinkView("node-0", "10.0.0.1:50061", True, "", "closed", 0, NodeState.READY, "")
MODELS = (ModelView("demo", 512, 1),)


def view(node: NodeStatus | None = None, link: LinkView = FINE, **parts: object) -> ClusterStatus:
    router = RouterView("router-0", (link,), (LinkLossView(time.time() - 3, "node-0", "silence", 4),))
    nodes = (NodeStatus(READY, (IDLE,)) if node is None else node,)
    return ClusterStatus(**({"nodes": nodes, "router": router, "models": MODELS} | parts))  # type: ignore[arg-type]


def test_a_healthy_idle_cluster_has_no_problems() -> None:
    assert problems(view()) == []


def test_certificates_of_which_less_than_a_third_is_left_are_named_and_nodes_that_do_not_say_are_not() -> None:
    day, now = 86400.0, time.time()
    fresh = ProtectionView(tls="require", certificate_expires=now + 11 * day, certificate_life_s=30 * day)
    late, gone = replace(fresh, certificate_expires=now + 9 * day), replace(fresh, certificate_expires=now - 7200.0)
    router = RouterView("router-0", (FINE,), protection=late)
    silent = NodeStatus(replace(READY, node_id="node-1"), (IDLE,))
    nodes = (NodeStatus(READY, (IDLE,), protection=gone), silent)
    assert problems(ClusterStatus(nodes, router, MODELS, orchestrator=OrchestratorView(fresh))) == [
        "the certificate of node-0 has expired 2.0 hours ago",
        "the certificate of router-0 expires in 216.0 hours",
    ]


def test_a_node_that_does_not_answer_is_named() -> None:
    assert problems(view(NodeStatus(READY, error="UNAVAILABLE: refused"))) == ["node-0 does not answer: UNAVAILABLE: refused"]


def test_a_node_that_recovers_says_why() -> None:
    node = Node("node-0", "10.0.0.1:50061", state=NodeState.RECOVERING)
    assert problems(view(NodeStatus(node, reason="rank 1 was killed"))) == ["node-0 is RECOVERING: rank 1 was killed"]


def test_a_rank_that_stands_still_in_a_collective_is_named() -> None:
    still = RankView(1, 8, "all_reduce", 3, 1.7, 0.01, 2**20)
    assert problems(view(NodeStatus(READY, (IDLE, still)))) == ["node-0 rank 1 has not moved for 1.7 s, in all_reduce"]


def test_suspicion_breaker_and_a_missing_link_are_reported_of_the_router() -> None:
    bad = LinkView("node-0", "10.0.0.1:50061", False, "silence", "half_open", 0, NodeState.READY, "")
    assert problems(view(link=bad)) == [
        "router-0 has no link to node-0: silence",
        "router-0 suspects node-0: silence",
        "the breaker of node-0 at router-0 is half-open",
    ]


def test_why_an_address_is_not_reached_is_reported() -> None:
    never = LinkView("", "10.0.0.9:50061", False, "", "closed", 0, NodeState.STARTING, "", failure="UNAVAILABLE: refused")
    found = problems(view(router=RouterView("router-0", (FINE, never))))
    assert found == ["router-0 has no link to 10.0.0.9:50061: UNAVAILABLE: refused"]
    lost = RouterView(
        "router-0", (FINE, replace(never, node_id="node-1")), (LinkLossView(time.time(), "node-1", "silence", 2),)
    )
    assert problems(view(router=lost)) == ["router-0 has no link to node-1: silence: UNAVAILABLE: refused"]


def test_a_node_that_was_lost_and_is_no_member_any_more_is_missed_for_a_while() -> None:
    def losses(ago_s: float) -> ClusterStatus:
        loss = LinkLossView(time.time() - ago_s, "node-1", "link_lost", 2)
        return view(router=RouterView("router-0", (FINE,), (loss,)))

    assert problems(losses(5)) == ["router-0 has no link to node-1: link_lost"]
    assert problems(losses(3600)) == []


def test_a_clock_that_is_off_is_named_with_its_direction() -> None:
    def skewed(skew_s: float) -> ClusterStatus:
        return view(link=replace(FINE, clock_skew_s=skew_s))

    assert problems(skewed(3600.0)) == ["the clock of node-0 is 3600 s ahead of that of router-0"]
    assert problems(skewed(-60.0)) == ["the clock of node-0 is 60 s behind that of router-0"]
    assert problems(skewed(0.6)) == []


def test_a_linked_node_without_a_lease_is_a_problem_only_when_the_orchestrator_could_say_so() -> None:
    stranger = NodeStatus(READY, (IDLE,), member=False)
    assert problems(view(stranger)) == ["node-0 is linked but not a member: it has no lease at the orchestrator"]
    unknown = problems(view(stranger, errors={"orchestrator": "UNAVAILABLE: refused"}))
    assert unknown == ["orchestrator does not answer: UNAVAILABLE: refused"]


def test_without_a_ready_node_that_is_said() -> None:
    assert problems(view(models=())) == ["no node is ready: every request waits, then fails with NO_NODES"]


def test_people_see_problems_first_and_every_loss_with_its_cause() -> None:
    lost = NodeStatus(READY, (IDLE,), 1, recent_losses=(RankLossView(time.time(), 1, "RANK_STALLED", "rank 1 stood still"),))
    console = Console(width=160, record=True, file=io.StringIO())
    show(console, view(lost))
    text = console.export_text()
    assert text.startswith("no problems")
    for expected in ("links of router-0", "silence", "RANK_STALLED", "rank 1 stood still", "4 attempts"):
        assert expected in text


def test_scripts_get_problems_and_states_by_name() -> None:
    document = as_document(view())
    assert document["problems"] == []
    assert document["nodes"][0]["node"]["state"] == "READY"
    assert document["router"]["links"][0]["state"] == "READY"


def test_the_link_of_a_removed_model_is_not_missed_while_its_node_is_linked() -> None:
    lost = tuple(LinkLossView(time.time() - 3, name, "link_lost", 0) for name in ("node-0/org/second", "node-1", "node-1/x"))
    view_of_all = view(router=RouterView("router-0", (FINE,), lost))
    assert problems(view_of_all) == [
        "router-0 has no link to node-1: link_lost",
        "router-0 has no link to node-1/x: link_lost",
    ]
    down = replace(FINE, node_id="node-0/org/second", up=False)
    still_served = view(router=RouterView("router-0", (FINE, down), lost[:1]))
    assert problems(still_served) == ["router-0 has no link to node-0/org/second: link_lost"]
