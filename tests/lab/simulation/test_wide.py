"""Many nodes and several routers, in whole simulations, and versions of them that are broken on purpose.

In the laboratory 200 nodes and 4 routers for two minutes. RYZANSTEIN_WIDE=1000,10,600 takes about half an hour, with
`-o faulthandler_timeout=7200`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from tests.lab.simulation.test_simulation import simulated

from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.planning.plan import WIDE_FAULTS, WIDE_FROM, Kind
from ryzanstein.lab.simulation.planning.wide import CHANGES

SMALL = ("24", "2", "100")
"""Nodes, routers and seconds: two or three changes."""
_SMALLEST = ("12", "2", "50")
_LARGE = os.environ.get("RYZANSTEIN_WIDE", "200,4,120").split(",")
_LARGE_S = 7200

_BROKEN = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from dataclasses import replace
from ryzanstein.lab.simulation.planning.plan import WIDE_FROM, Kind, PlannedFault
from ryzanstein.lab.simulation.planning.wide import wide_plan
from ryzanstein.lab.simulation.simulation import simulate
BREAK
faults = [PlannedFault(number, Kind(kind), *when) for number, (kind, *when) in enumerate(STRIKES)]
outcome = simulate(replace(wide_plan(WIDE_FROM, 20, 2, 90), faults=tuple(faults)))
print(outcome.violations)
assert "PROMISE" in {violation.failure.name for violation in outcome.violations}
"""
# What is broken, which promise that breaks, the changes that show it, and how it is broken.
BROKEN: dict[str, tuple[str, list[tuple[str, float, float]], str]] = {
    "routers that do not agree on the order of nodes": (
        "VIEWS",
        [],
        """
from ryzanstein.lab.simulation.machine.loop import OWNER
from ryzanstein.router.choose import members
weights = members.weights
members.weights = lambda key, names: weights(key + OWNER.get().name.encode(), names)
""",
    ),
    "routers that miss that nodes leave": (
        "VIEWS",
        [("leave_many", 40.0, 20.0)],
        """
from ryzanstein.router.membership.view import View
remove, change = View._remove, View._change
def changed(self, delta):
    View._remove = lambda self, node_id: None
    change(self, delta)
    View._remove = remove
View._change = changed
""",
    ),
    "links that are never quiet": (
        "BOUND",
        [],
        """
from ryzanstein.worker.agent import routers
routers.QUIET_AFTER_S = 1e9
""",
    ),
    "links that are never forgotten": (
        "LEFT",
        [("leave_many", 40.0, 10.0)],
        """
from ryzanstein.router.nodes.linker import Linker
Linker._forget = lambda self, link: None
""",
    ),
    "nodes that come back a minute after the orchestrator could not be reached": (
        "VIEWS",
        [("part_half", 35.0, 20.0)],
        """
from ryzanstein.worker.agent.membership import node_membership
node_membership._FIRST_BACKOFF_S = node_membership._LONGEST_BACKOFF_S = 60.0
""",
    ),
    "an orchestrator that takes longer than ten seconds to serve again": (
        "VIEWS",
        [("kill_orchestrator", 40.0, 0.0)],
        """
from ryzanstein.orchestrator.state.members.recovery import Settling
from ryzanstein.lab.simulation.machine.clock import CLOCK
Settling.over = lambda self, now: CLOCK.now < 30.0 or CLOCK.now > 60.0
""",
    ),
    "routers that continue no answer of another node": (
        "BLAMED",
        [("kill_many", 30.0 + 2.0 * number, 0.0) for number in range(20)],
        """
from ryzanstein import errors
from ryzanstein.router.nodes.roster import Roster
start = Roster.start
def first_alone(self, node_id, attempt, sink):
    if any(choice.token_ids for choice in attempt.generated):
        raise errors.internal("it was begun elsewhere")
    return start(self, node_id, attempt, sink)
Roster.start = first_alone
""",
    ),
    "routers that forget what an answer has when they begin it elsewhere": (
        "CHANGED",
        [("kill_many", 30.0 + 2.0 * number, 0.0) for number in range(20)],
        """
from dataclasses import replace
from ryzanstein.router.nodes.links import link
submit_now = link.submit_now
def forgetful(attempt, handle):
    wire = submit_now(attempt, handle)
    for choice in wire.generated:
        if len(choice.token_ids) > 1:
            choice.token_ids[0], choice.token_ids[1] = choice.token_ids[1], choice.token_ids[0]
    return wire
link.submit_now = forgetful
""",
    ),
}


def wide(seed: int, *size: str, hash_seed: int = 0, timeout_s: float = 110) -> dict[str, Any]:
    run = simulated("-m", "ryzanstein.lab.simulation.one", str(seed), *size, hash_seed=hash_seed, timeout_s=timeout_s)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def broken(name: str) -> str:
    """The program that runs a broken version."""
    promise, strikes, change = BROKEN[name]
    return _BROKEN.replace("BREAK", change).replace("PROMISE", promise).replace("STRIKES", repr(strikes))


def test_many_nodes_and_two_routers_break_no_promise() -> None:
    result = wide(WIDE_FROM, *SMALL)
    assert result["violations"] == []
    assert set(result["outcomes"]) == {"complete"}
    assert result["reached"]["routers agreed on keys"] > 0
    assert len(result["figures"]["converged_after_s"]) > 1
    assert 0 < result["figures"]["messages_per_s_of_a_quiet_link"] <= 1.2


@pytest.mark.long
def test_a_wide_seed_is_the_same_story_whatever_the_hash_seed() -> None:
    assert wide(WIDE_FROM, *_SMALLEST)["digest"] == wide(WIDE_FROM, *_SMALLEST, hash_seed=1)["digest"]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.lab
def test_a_broken_version_is_found(name: str) -> None:
    run = simulated("-c", broken(name))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.lab
def test_a_change_of_the_model_of_many_nodes_breaks_no_promise() -> None:
    result = wide(WIDE_FROM, "60", "3", "300")
    assert result["violations"] == []
    assert result["reached"]["fault change_model"] == 1


@pytest.mark.lab
@pytest.mark.timeout(_LARGE_S)
def test_hundreds_of_nodes_break_no_promise() -> None:
    result = wide(WIDE_FROM, *_LARGE, timeout_s=_LARGE_S)
    assert result["violations"] == []
    assert set(result["outcomes"]) == {"complete"}


def test_only_the_largest_seeds_have_many_nodes() -> None:
    assert plan(WIDE_FROM - 1).wide is None
    assert not any(fault.kind in WIDE_FAULTS for seed in range(2000) for fault in plan(seed).faults)
    planned = [plan(seed) for seed in range(WIDE_FROM, WIDE_FROM + 100)]
    assert {len(each.nodes) for each in planned} == {30, 60, 100}
    kinds = {fault.kind for each in planned for fault in each.faults}
    assert kinds == {*CHANGES, Kind.CHANGE_MODEL}
    assert all(fault.at_s + fault.lasts_s < each.duration_s + each.calm_s for each in planned for fault in each.faults)


def test_a_size_needs_a_seed_of_a_wide_plan() -> None:
    run = simulated("-m", "ryzanstein.lab.simulation", "--seed", "3", "--nodes", "20")
    assert run.returncode == 2
    assert "--nodes" in run.stderr
