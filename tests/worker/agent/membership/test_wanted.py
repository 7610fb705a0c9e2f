"""Which models a node should serve, from what is deployed to it and what it was started with."""

from __future__ import annotations

from ryzanstein.cluster import Deployment, Instruction
from ryzanstein.worker.agent.membership.wanted import wanted_models
from ryzanstein.worker.agent.model_host import ModelChoice

A, B = ModelChoice("a", "/a"), ModelChoice("b", "/b")
SIZES = {"/a": 40, "/b": 30, "/c": 20, "/d": 60, "/e": 50}


def names(*deployments: Deployment, plural: bool = True, memory: int = 100) -> list[str]:
    return list(wanted_models(Instruction(deployments, plural=plural), (A, B), SIZES.__getitem__, memory))


def test_without_deployments_a_node_serves_what_it_was_started_with_even_if_it_does_not_fit() -> None:
    assert names() == ["a", "b"]
    assert names(memory=1) == ["a", "b"]
    assert names(plural=False) == ["a", "b"]


def test_a_deployment_is_served_beside_what_fits() -> None:
    assert names(Deployment("c", "/c")) == ["c", "a", "b"]


def test_what_the_node_was_started_with_gives_way_the_last_first() -> None:
    assert names(Deployment("d", "/d")) == ["d", "a"]
    assert names(Deployment("d", "/d"), memory=90) == ["d", "b"]
    assert names(Deployment("d", "/d"), Deployment("c", "/c")) == ["d", "c"]


def test_models_that_may_sleep_share_the_room_of_the_largest() -> None:
    sleepers = Deployment("d", "/d", idle_unload_s=5), Deployment("e", "/e", idle_unload_s=5)
    assert names(*sleepers) == ["d", "e", "a"]
    assert names(*sleepers, Deployment("c", "/c")) == ["d", "e", "c"]


def test_a_deployment_replaces_the_model_of_its_name() -> None:
    wanted = wanted_models(Instruction((Deployment("a", "/c", 1, 3),)), (A, B), SIZES.__getitem__, 100)
    assert {name: each.choice for name, each in wanted.items()} == {"a": ModelChoice("a", "/c", 3), "b": B}


def test_an_older_orchestrators_deployment_takes_the_first_models_place() -> None:
    assert names(Deployment("c", "/c"), plural=False) == ["c", "b"]
