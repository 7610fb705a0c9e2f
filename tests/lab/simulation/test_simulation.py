"""Whole simulations, each in a process of its own: time is replaced for good in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.planning.plan import ENGINES_FROM, LIMITS_FROM, LOAD_FROM, MODELS_FROM, Kind

# Nodes with two or three models; many of their faults strike one model.
SEVERAL_MODELS = (1000000108, 1000000116, 1000000119)
# Nodes that become slow, and requests that are sent to two routers.
LIMITED = (LIMITS_FROM + 1,)
# Engines of others on all nodes and on one of two, with a reserve; a reserve alone.
FOREIGN, MIXED, RESERVED = ENGINES_FROM, ENGINES_FROM + 27, ENGINES_FROM + 1335
LOADED = (2000000001, 2000000004)
# Each broke a promise before it was mended: see docs/internals/testing.md.
PAST_FAILURES = (3, 6, 8, 9, 10, 12, 28, 61, 117, 5057, 5203, 767199570, 68676410, 374133889)
PAST_FAILURES_OF_MODELS = (1000000101, 1500000016, 1092415984)

_PLANTED = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from ryzanstein.router.core.admission import Admission
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.simulation import simulate
Admission.enter = Admission._taken
outcome = simulate(plan(8))
assert any(violation.failure is BrokenPromise.BOUND for violation in outcome.violations), outcome.violations
"""


# A loss of one model's ranks ends the generations of all models of the node.
_PLANTED_BETWEEN_MODELS = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from collections import defaultdict
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.machine.loop import OWNER
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.simulation import simulate
from ryzanstein.worker.agent.versions.generations import RunningGenerations
made, init, fail_all = defaultdict(list), RunningGenerations.__init__, RunningGenerations.fail_all
def remembered(self, *args, **kwargs):
    init(self, *args, **kwargs)
    made[OWNER.get()].append(self)
def fail_everywhere(self, *args, **kwargs):
    for running in made[OWNER.get()]:
        fail_all(running, *args, **kwargs)
RunningGenerations.__init__, RunningGenerations.fail_all = remembered, fail_everywhere
def found(seed):
    return any(violation.failure is BrokenPromise.SPARED for violation in simulate(plan(seed)).violations)
# In a plan of few faults nothing may be running on the other model just then.
assert any(found(seed) for seed in (1000000119, 1000000143, 1000000116, 1000000155))
"""


# No router knows which keys the others hold.
_PLANTED_KEYS = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.simulation import simulate
from ryzanstein.router.journal.keys import JournalKeys
async def free(*_, **__):
    return None
JournalKeys.claim = free
assert any(violation.failure is BrokenPromise.TWICE for violation in simulate(plan(SEED)).violations)
"""


# Each answer is charged with one token more than it has.
_PLANTED_CHARGE = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.simulation import simulate
from ryzanstein.router.access.limits.hold import Hold
settle = Hold.settle
Hold.settle = lambda self, num_tokens: settle(self, num_tokens + 1)
assert any(violation.failure is BrokenPromise.BOUND for violation in simulate(plan(SEED)).violations)
"""


# Routers send requests to engines that do not support them, or take a reserve for any other node.
_PLANTED_ENGINES = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.simulation import simulate
PLANT
def found(seed):
    return any(violation.failure is BrokenPromise.ENGINE for violation in simulate(plan(seed)).violations)
assert found(SEED)
"""
_PLANTED_SUPPORT = _PLANTED_ENGINES.replace(
    "PLANT",
    """
from ryzanstein.router.nodes.roster import Roster
Roster.lacking = lambda self, features, used=(): frozenset()
""",
)
_PLANTED_RESERVE = _PLANTED_ENGINES.replace(
    "PLANT",
    """
from dataclasses import replace
from ryzanstein.router.choose.members import Members
put = Members.put
Members.put = lambda self, view: put(self, replace(view, reserve=False))
""",
)


def simulated(*arguments: str, hash_seed: int = 0, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    """One run of a program of the simulator's."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def one(seed: int, hash_seed: int = 0) -> dict[str, Any]:
    run = simulated("-m", "ryzanstein.lab.simulation.one", str(seed), hash_seed=hash_seed)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("seed", PAST_FAILURES[:2])
@pytest.mark.long
def test_what_failed_once_holds(seed: int) -> None:
    assert violations(seed) == []


@pytest.mark.parametrize("seed", [*PAST_FAILURES[2:], *PAST_FAILURES_OF_MODELS])
@pytest.mark.lab
def test_what_failed_once_still_holds(seed: int) -> None:
    assert violations(seed) == []


def violations(seed: int) -> list[Any]:
    """Returns the promises that the simulation of a seed broke. Some answers must be complete: else nothing was tried."""
    result = one(seed)
    assert result["complete"] > 0
    return list(result["violations"])


@pytest.mark.long
def test_a_seed_is_the_same_story_whatever_the_hash_seed() -> None:
    assert one(3, hash_seed=0)["digest"] == one(3, hash_seed=1)["digest"]


def test_the_command_replays_a_seed_and_tells_its_story() -> None:
    run = simulated("-m", "ryzanstein.lab.simulation", "--seed", "3", "--log")
    assert run.returncode == 0, run.stdout[-2000:]
    assert "seed: 3" in run.stdout
    assert "generation accepted" in run.stdout
    assert "answers complete" in run.stdout


def test_the_command_says_what_it_needs() -> None:
    run = simulated("-m", "ryzanstein.lab.simulation")
    assert run.returncode == 2
    assert "--seed" in run.stderr


@pytest.mark.parametrize("seed", SEVERAL_MODELS)
@pytest.mark.long
def test_the_models_of_a_node_do_not_disturb_each_other(seed: int) -> None:
    assert plan(seed).more_models
    result = one(seed)
    assert result["violations"] == []
    assert result["reached"]["answer failed over from a node with another struck model"] > 0


def test_a_small_seed_means_one_model_and_a_larger_one_may_mean_several() -> None:
    assert not any(plan(seed).more_models for seed in (*PAST_FAILURES, MODELS_FROM - 1))
    assert {len(plan(seed).models) for seed in range(MODELS_FROM, MODELS_FROM + 50)} == {1, 2, 3}
    for seed in range(MODELS_FROM, MODELS_FROM + 50):
        planned = plan(seed)
        assert len({fault.number for fault in planned.faults}) == len(planned.faults)
        assert all(model.nodes <= frozenset(range(len(planned.nodes))) and model.nodes for model in planned.more_models)


@pytest.mark.parametrize("seed", [LOADED[1], pytest.param(LOADED[0], marks=pytest.mark.lab)])
@pytest.mark.long
def test_slow_nodes_long_prompts_and_keys_at_two_routers_break_no_promise(seed: int) -> None:
    assert any(fault.kind is Kind.SLOW_NODE for fault in plan(seed).faults)
    result = one(seed)
    assert result["violations"] == []
    assert result["reached"]["asked at two routers"] > 0


def test_only_large_seeds_have_load() -> None:
    assert not any(client.twice for seed in (*PAST_FAILURES, LOAD_FROM - 1) for client in plan(seed).clients)
    planned = [plan(seed) for seed in range(LOAD_FROM, LOAD_FROM + 50)]
    assert {each.max_held_prompt_bytes for each in planned} == {2**16, 2**20, 128 * 2**20}
    assert all(len({fault.number for fault in each.faults}) == len(each.faults) for each in planned)


@pytest.mark.long
def test_two_generations_for_one_key_are_found() -> None:
    run = simulated("-c", _PLANTED_KEYS.replace("SEED", str(LOADED[1])))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.long
def test_a_disturbance_of_another_model_is_found() -> None:
    run = simulated("-c", _PLANTED_BETWEEN_MODELS)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("seed", LIMITED)
@pytest.mark.long
def test_limits_at_a_server_that_is_sometimes_away_charge_each_answer_once(seed: int) -> None:
    assert any(fault.kind is Kind.LIMITS_AWAY for fault in plan(seed).faults)
    result = one(seed)
    assert result["violations"] == []
    assert result["reached"]["answers charged to the token"] > 0


def test_only_the_largest_seeds_have_limits() -> None:
    assert not any(plan(seed).limits for seed in (*PAST_FAILURES, LOAD_FROM, LIMITS_FROM - 1))
    planned = [plan(seed) for seed in range(LIMITS_FROM, LIMITS_FROM + 50)]
    assert {each.limits.concurrent for each in planned if each.limits is not None} == {1, 2, 8}
    assert all(len({fault.number for fault in each.faults}) == len(each.faults) for each in planned)


@pytest.mark.parametrize(
    ("seed", "seen"), [(FOREIGN, "answer continued by a node that computes other tokens"), (MIXED, "reserve used")]
)
@pytest.mark.long
def test_engines_of_others_and_a_reserve_break_no_promise(seed: int, seen: str) -> None:
    assert plan(seed).foreign
    result = one(seed)
    assert result["violations"] == []
    assert result["complete"] > 0
    assert result["reached"][seen] > 0


def test_only_the_largest_seeds_have_engines_of_others() -> None:
    assert not any(plan(seed).foreign or plan(seed).reserve for seed in (*PAST_FAILURES, LOAD_FROM, ENGINES_FROM - 1))
    planned = [plan(seed) for seed in range(ENGINES_FROM, ENGINES_FROM + 50)]
    assert {len(each.foreign) for each in planned if len(each.nodes) == 2} == {0, 1, 2}
    assert {len(each.reserve) for each in planned if len(each.nodes) > 1} == {0, 1}


@pytest.mark.parametrize(("planted", "seed"), [(_PLANTED_SUPPORT, MIXED), (_PLANTED_RESERVE, RESERVED)])
@pytest.mark.long
def test_a_router_that_ignores_what_nodes_say_of_themselves_is_found(planted: str, seed: int) -> None:
    run = simulated("-c", planted.replace("SEED", str(seed)))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.long
def test_a_token_too_many_is_found() -> None:
    run = simulated("-c", _PLANTED_CHARGE.replace("SEED", str(LIMITED[0])))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_a_planted_fault_is_found() -> None:
    run = simulated("-c", _PLANTED)
    assert run.returncode == 0, run.stderr[-2000:]
