"""A placement is computed in steps between which the orchestrator goes on, and is what it would be in one piece."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import patch

import pytest
from tests.orchestrator.fleet import Fleet, Simulated

from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.placing.placement import place_in_steps
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds

MODELS = [Deployment(f"m{number}", f"/m{number}", 2, 1) for number in range(12)]
SIZES = {each.path: 10 + number for number, each in enumerate(MODELS)}


@pytest.fixture(autouse=True)
def small_steps():
    with patch("ryzanstein.orchestrator.placing.placement.STEP", 10):
        yield


def measured():
    """A cluster whose nodes have measured all models, and of which nothing is placed since."""
    cluster = Simulated(*MODELS, bounds=RolloutBounds())
    fleet = Fleet(cluster, *"abcdefghij", sizes=SIZES)
    fleet.round()
    cluster.restart()
    return cluster, fleet


def placed(cluster):
    cluster.reconciler.update()
    return {each.deployment.model: each.assigned_nodes for each in cluster.reconciler.status()}


def drain(cluster, fleet):
    cluster.registry.drain("a")


def leave(cluster, fleet):
    cluster.registry.leave("b", fleet.nodes[1].lease_id)
    fleet.nodes.pop(1)


def remove(cluster, fleet):
    cluster.catalog.remove("m3")


def deploy(cluster, fleet):
    cluster.catalog.put(Deployment("new", "/m1", 3, 1))


def place(cluster, fleet):
    cluster.reconciler.update()


CHANGES = [drain, leave, remove, deploy, place]


async def test_others_run_between_the_steps_and_the_placement_is_that_of_one_piece():
    (cluster, _), (twin, _) = measured(), measured()
    passes = 0

    async def other():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await cluster.reconciler.prepare()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert passes >= len(MODELS)
    with patch("ryzanstein.orchestrator.reconcile.place", side_effect=AssertionError("placed again")):
        found = placed(cluster)
    assert found == placed(twin)
    assert all(len(nodes) == 2 for nodes in found.values())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [0, 3, 20])
async def test_what_changes_meanwhile_counts_as_if_it_had_changed_right_after(change, after):
    (cluster, fleet), (twin, others) = measured(), measured()
    preparing = asyncio.create_task(cluster.reconciler.prepare())
    for _ in range(after + 1):
        await asyncio.sleep(0)
    assert not preparing.done()
    change(cluster, fleet)
    await preparing
    placed(twin)
    change(twin, others)
    assert placed(cluster) == placed(twin)


async def test_a_drain_that_was_accepted_meanwhile_leaves_the_node_nothing():
    cluster, fleet = measured()
    preparing = asyncio.create_task(cluster.reconciler.prepare())
    await asyncio.sleep(0)
    drain(cluster, fleet)
    await preparing
    assert all("a" not in nodes for nodes in placed(cluster).values())
    instruction = cluster.reconciler.instruct(cluster.registry.find("a"))
    assert instruction.drain
    assert instruction.deployments == ()


async def test_two_that_prepare_place_once():
    cluster, _ = measured()
    with patch("ryzanstein.orchestrator.reconcile.place_in_steps", wraps=place_in_steps) as steps:
        await asyncio.gather(cluster.reconciler.prepare(), cluster.reconciler.prepare())
        placed(cluster)
        await cluster.reconciler.prepare()
    assert steps.call_count == 1
