"""Several orchestrators of which one leads, in whole simulations, and versions of them that are broken on purpose."""

from __future__ import annotations

import pytest
from tests.lab.simulation.test_simulation import one, simulated

from ryzanstein.lab.simulation.leaders.leader_checks import may_be
from ryzanstein.lab.simulation.leaders.operator import Said
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.planning.plan import LEADER_FAULTS, LEADERS_FROM, Kind

SHORT = LEADERS_FROM + 1
# Each broke a promise before it was mended: see docs/internals/testing.md.
PAST_FAILURES = (LEADERS_FROM + 2, LEADERS_FROM + 4, LEADERS_FROM + 7, LEADERS_FROM + 505, LEADERS_FROM + 513)

_BROKEN = """
from ryzanstein.lab.simulation.machine import clock
clock.install()
from dataclasses import replace
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.planning.plan import Kind, LeadersPlan, NodePlan, PlannedFault
from ryzanstein.lab.simulation.simulation import simulate
BREAK
faults = [PlannedFault(number, Kind(kind), *when, 1, rank) for number, (kind, *when, rank) in enumerate(STRIKES)]
planned = replace(
    plan(SEED), duration_s=70.0, faults=tuple(faults), nodes=(NodePlan(1, 0.02, 16_384, 16_384, 64),) * 4,
    leaders=LeadersPlan(2, (1.0,) * 6, 1.0, 0.1, True),
)
outcome = simulate(planned)
print(outcome.violations)
assert "PROMISE" in {violation.failure.name for violation in outcome.violations}
"""
# A leader is cut off from Redis, and for a while from half of the nodes. One of the others starts again, and then the next
# leader is killed.
_SPLIT = [
    ("cut_redis", 20.0, 40.0, 3),
    ("cut_leader", 20.5, 9.0, 4),
    ("kill_node", 42.0, 0.0, 0),
    ("kill_leader", 50.0, 0.0, 0),
]
_KILLS = [("kill_leader", at_s, 0.0, 0) for at_s in (20.0, 32.0, 44.0, 56.0)]
_ENDS_NEVER = """
from ryzanstein.orchestrator.leading.election import Election
Election.tenure = property(lambda self: self._tenure)
"""

# What is broken, which promise that breaks, a seed, the strikes that show it, and how it is broken.
BROKEN = {
    "a leader that acts until it hears of another one": ("TWO_LEADERS", 1, _SPLIT, _ENDS_NEVER),
    "such a leader, and nodes that do not compare epochs": (
        "EPOCH",
        1,
        _SPLIT,
        _ENDS_NEVER
        + """
from ryzanstein.worker.agent.membership.obedience import KeptLeader
async def follow(self, leader):
    pass
KeptLeader.follow = follow
""",
    ),
    "deployments that are not stored": (
        "ACCEPTED",
        1,
        _KILLS[:1],
        """
from ryzanstein.orchestrator.state.redis_store import RedisStore
async def put(self, deployment):
    pass
RedisStore.put_deployment = put
""",
    ),
    "refusals that are not stored": (
        "ACCEPTED",
        2,
        _KILLS,
        """
from ryzanstein.orchestrator.state.redis_store import RedisStore
async def save(self, refusals):
    pass
RedisStore.save_refusals = save
""",
    ),
    "a new leader that changes nodes before all are back": (
        "ROLLOUT",
        9,
        _KILLS,
        """
from ryzanstein.orchestrator.placing.rolling import RollingChanges
update = RollingChanges.update
RollingChanges.update = lambda self, *args, all_known: update(self, *args)
""",
    ),
    "a revision that does not wait for the one before": (
        "ROLLOUT",
        1,
        [],
        """
from ryzanstein.orchestrator.placing import rolling
rolling.is_away = lambda node, deployment: False
from ryzanstein.orchestrator.placing.rolling import RollingChanges, WavePlaces
change_of = RollingChanges._change_of
def forgetful(self, deployment):
    known = self._changes.get(deployment.model)
    if known is None or known.revision != deployment.revision:
        self._places[deployment.model] = WavePlaces()
    return change_of(self, deployment)
RollingChanges._change_of = forgetful
""",
    ),
    "standbys that do not take the lease of one that died": (
        "LEADER",
        1,
        [("kill_leader", 66.0, 0.0, 0)],
        """
from ryzanstein.orchestrator.leading.election import Election
wanted = Election.wanted
Election.wanted = lambda self: wanted(self) if self.tenure is not None or not self.seen.holder else None
""",
    ),
    "a new leader that drains all nodes": (
        "SPARED",
        1,
        _KILLS,
        """
from ryzanstein.cluster import Instruction
from ryzanstein.orchestrator.reconcile import Reconciler
made, init, instruct = [], Reconciler.__init__, Reconciler.instruct
def remembered(self, *args):
    init(self, *args)
    made.append(self)
Reconciler.__init__ = remembered
Reconciler.instruct = lambda self, node: instruct(self, node) if self is made[0] else Instruction(drain=True)
""",
    ),
}


def broken(name: str, seed: int | None = None) -> str:
    """The program that runs a broken version."""
    promise, usual, strikes, change = BROKEN[name]
    seed = LEADERS_FROM + (usual if seed is None else seed)
    program = _BROKEN.replace("BREAK", change).replace("SEED", str(seed)).replace("PROMISE", promise)
    return program.replace("STRIKES", repr(strikes))


def test_leaders_that_are_struck_break_no_promise() -> None:
    result = one(SHORT)
    assert result["violations"] == []
    assert result["complete"] > 0
    assert result["reached"]["leaders that instructed"] > 1


@pytest.mark.parametrize("seed", PAST_FAILURES)
@pytest.mark.lab
def test_what_failed_once_with_several_orchestrators_still_holds(seed: int) -> None:
    assert one(seed)["violations"] == []


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.lab
def test_a_broken_version_is_found(name: str) -> None:
    run = simulated("-c", broken(name))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_the_largest_seeds_have_several_orchestrators_and_only_they() -> None:
    assert plan(LEADERS_FROM - 1).leaders is None
    assert not any(fault.kind in LEADER_FAULTS for seed in range(2000) for fault in plan(seed).faults)
    planned = [plan(seed) for seed in range(LEADERS_FROM, LEADERS_FROM + 200)]
    assert {each.leaders.num for each in planned if each.leaders is not None} == {2, 3}
    kinds = {fault.kind for each in planned for fault in each.faults}
    assert kinds == {*LEADER_FAULTS, Kind.KILL_NODE}
    rates = [rate for each in planned if each.leaders is not None for rate in each.leaders.rates]
    assert min(rates) < 0.6
    assert max(rates) > 1.8


@pytest.mark.parametrize(
    ("said", "forgot_at", "allowed"),
    [
        ("ab", [], {"b"}),
        ("a?", [], {"a", "b", ""}),
        ("ab", [2.5], {"a", "b"}),
        ("ab", [5.0], {"b"}),
        ("a", [1.5], {"a", ""}),
        ("a", [5.0], {"a"}),
    ],
)
def test_what_was_accepted_must_be_stored_unless_redis_may_have_forgotten_it(
    said: str, forgot_at: list[float], allowed: set[str]
) -> None:
    """Each was asked at 1.0, 2.0 and so on, and answered 0.1 s later; ? was not answered."""
    answers = [Said(at, at + 0.1, each != "?", None if each == "?" else each) for at, each in enumerate(said, 1)]
    assert {value for value in ("a", "b", "") if may_be(answers, value, forgot_at)} == allowed
