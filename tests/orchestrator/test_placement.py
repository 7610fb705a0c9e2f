"""Placement on older nodes, which serve one deployment each. Those with room for several: test_packing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.cluster import Deployment, Node, NodeState
from ryzanstein.orchestrator.placing.placement import place as place_all


def node(node_id, model="", state=NodeState.READY, **more):
    return Node(node_id, "h:1", "1", model=model, state=state, **more)


def place(deployments, nodes):
    """Older nodes have one deployment each."""
    return {node_id: deployment for node_id, (deployment,) in place_all(deployments, nodes).assigned.items()}


def nodes_of(placed, model):
    return {node_id for node_id, deployment in placed.items() if deployment.model == model}


MODELS = ["x", "y", "z"]
NODES = st.lists(
    st.builds(
        node,
        st.text("abcdefgh", min_size=1, max_size=2),
        st.sampled_from(["", "other", *MODELS]),
        st.sampled_from(NodeState),
        drain_requested=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda n: n.node_id,
)
DEPLOYMENTS = st.lists(st.sampled_from(MODELS), unique=True).flatmap(
    lambda models: st.tuples(*(st.builds(Deployment, st.just(m), st.just("/m"), st.integers(0, 5)) for m in models))
)


def test_every_node_serves_a_deployment_without_a_number():
    placed = place([Deployment("x", "/x")], [node("a"), node("b", "other"), node("c", "x")])
    assert nodes_of(placed, "x") == {"a", "b", "c"}


def test_nodes_that_serve_a_model_keep_it():
    placed = place([Deployment("x", "/x", 1)], [node("a"), node("b", "x"), node("c")])
    assert nodes_of(placed, "x") == {"b"}


def test_a_new_deployment_never_takes_a_node_from_one_that_states_a_number():
    serving = [node("a", "y"), node("b", "y")]
    placed = place([Deployment("x", "/x", 1), Deployment("y", "/y", 2)], serving)
    assert (nodes_of(placed, "x"), nodes_of(placed, "y")) == (set(), {"a", "b"})


def test_a_numbered_deployment_takes_from_one_that_wants_every_node():
    placed = place([Deployment("x", "/x", 1), Deployment("y", "/y", 0)], [node("a", "y"), node("b", "y")])
    assert (len(nodes_of(placed, "x")), len(nodes_of(placed, "y"))) == (1, 1)


def test_idle_nodes_are_taken_before_those_that_serve_something_desired():
    serving = [node("a", "y"), node("b", "y"), node("c")]
    placed = place([Deployment("x", "/x", 1), Deployment("y", "/y", 1)], serving)
    assert nodes_of(placed, "x") == {"c"}


def test_a_node_that_failed_to_serve_a_model_is_the_last_choice_for_it_but_still_one():
    failed = node("a", "x", NodeState.FAILED)
    assert nodes_of(place([Deployment("x", "/x", 1)], [failed, node("b")]), "x") == {"b"}
    assert nodes_of(place([Deployment("x", "/x", 1)], [failed]), "x") == {"a"}


def test_two_models_that_want_every_node_share_them_and_nodes_keep_what_they_serve():
    both = [Deployment("x", "/x"), Deployment("y", "/y")]
    placed = place(both, [node("a", "x"), node("b", "y"), *(node(f"n{i}") for i in range(40))])
    assert (placed["a"].model, placed["b"].model) == ("x", "y")
    assert min(len(nodes_of(placed, "x")), len(nodes_of(placed, "y"))) >= 10


def test_one_node_more_moves_no_other():
    deployments = [Deployment("x", "/x", 3)]
    few = [node(f"n{i}") for i in range(10)]
    before, after = place(deployments, few), place(deployments, [*few, node("new")])
    assert len(before.keys() - after.keys()) <= 1


@given(DEPLOYMENTS, NODES, st.randoms())
def test_the_order_of_nodes_and_deployments_does_not_matter(deployments, nodes, random):
    shuffled, mixed = list(nodes), list(deployments)
    random.shuffle(shuffled)
    random.shuffle(mixed)
    assert place(deployments, nodes) == place(mixed, shuffled)


@given(DEPLOYMENTS, NODES)
def test_no_deployment_gets_more_than_it_wants_and_none_is_short_while_a_node_is_free(deployments, nodes):
    placed = place(deployments, nodes)
    usable = {n.node_id for n in nodes if not n.drain_requested}
    assert placed.keys() <= usable
    for deployment in deployments:
        got = len(nodes_of(placed, deployment.model))
        assert not deployment.replicas or got <= deployment.replicas
        assert got >= deployment.replicas or placed.keys() == usable
    if any(d.replicas == 0 for d in deployments):
        assert placed.keys() == usable


@given(DEPLOYMENTS, NODES)
def test_once_nodes_serve_what_was_placed_the_placement_rests(deployments, nodes):
    placed = place(deployments, nodes)
    serving = [
        node(n.node_id, placed[n.node_id].model, drain_requested=n.drain_requested) if n.node_id in placed else n for n in nodes
    ]
    again = place(deployments, serving)
    assert {i: d.model for i, d in again.items()} == {i: d.model for i, d in placed.items()}
