"""What must hold where several orchestrators take each other's place, checked at every instruction and four times a second.

The simulator sees what each node was told and when, what is in the store, and what the operator was answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ryzanstein.cluster import Instruction, NodeState
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.checks import BrokenPromise, Checks
from ryzanstein.lab.simulation.cluster import MIN_READY_S, Cluster
from ryzanstein.lab.simulation.leaders.operator import Operator, Said, said_of
from ryzanstein.lab.simulation.leaders.redis_server import FORGETS_S, SimulatedRedis
from ryzanstein.lab.simulation.machine.process import Process
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL, Kind, LeadersPlan
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.worker.agent.membership.deployed import DeployedModels
from ryzanstein.worker.agent.model_host import ModelChoice

_KEY = "ryzanstein:orchestrator:{}"
WITHIN_S = 10.0
"""After the last strike one leader instructs again; by the slowest clock."""
FORGOT_S = 10.0
"""So much later where Redis forgot: a second lease has to pass when nodes know a later leader than Redis."""
_FRESH_S = 3.0
_STORED_S = 1.0
_LONGER_S = 90.0
"""What is left of a refusal is stored once a minute, and clocks differ."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node's failure to serve a revision."""

    incarnation: str
    revision: int


class LeaderChecks:
    """The checks of one simulation. Made before the nodes start; `look` is called again and again."""

    def __init__(self, cluster: Cluster, checks: Checks, plan: LeadersPlan, operator: Operator) -> None:
        self._cluster, self._checks, self._plan, self._operator = cluster, checks, plan, operator
        self._heard: dict[str, tuple[float, LeaderEpoch]] = {}
        """By node: when it last followed an instruction, and of whom."""
        self._moved = LeaderEpoch()
        self._deployed: dict[str, tuple[Process, DeployedModels]] = {}
        self._ends: dict[str, tuple[float, int]] = {}
        """By node: when its last change of the first model ended, infinite while it changes, and to which revision."""
        self._refused: dict[tuple[str, str], tuple[float, float, Refusal]] = {}
        """By node and model: a refusal of the leader, since when it has it, and when it ends."""
        self._refusing = LeaderEpoch()
        self._refusing_at = 0.0
        """When a leader was last seen."""
        self._num_deployed = 0
        self._redeployed_at: dict[str, float] = {}
        """By model: when it was last deployed, which forgets its refusals."""
        self._lost: set[str] = set()
        self.reached_leaders: set[LeaderEpoch] = set()
        kinds = {fault.kind for fault in cluster.plan.faults}
        self._forgets, self.spares_nodes = Kind.REDIS_FORGETS in kinds, Kind.KILL_NODE not in kinds
        services.ON_DEPLOYED[:] = [self._watch]
        cluster.record.on_line.append(self._on_line)

    def look(self) -> None:
        """Checks what is stored."""
        for (kind, name), said in self._operator.desires.said.items():
            if self._operator.desires.asking != (kind, name):
                self._look_at_stored(kind, name, said)
        self._look_at_refusals()

    def at_the_end(self) -> float:
        """Returns after how many seconds without a strike one leader must instruct."""
        return WITHIN_S / min(1.0, *self._plan.rates) + (FORGOT_S if self._forgets else 0.0)

    def one_instructs(self) -> None:
        """Checks that there is one leader, which all nodes follow."""
        controls = [services.control_of(each.process) for each in self._cluster.orchestrators if each.process is not None]
        leading = [control for control in controls if control is not None]
        if len(leading) != 1:
            self._checks.violated(
                BrokenPromise.LEADER, f"{len(leading)} orchestrators lead {self.at_the_end():.0f} s after the last strike"
            )
            return
        if leading[0]._settling is not None:
            self._checks.violated(BrokenPromise.LEADER, "the leader does not instruct yet")
        for service in self._cluster.nodes:
            at, leader = self._heard.get(service.name, (0.0, LeaderEpoch()))
            if service.alive and (leader != leading[0].leader or self._now - at > _FRESH_S):
                self._checks.violated(BrokenPromise.LEADER, f"{service.name} follows {leader}, {self._now - at:.1f} s ago")

    def none_noticed(self, outcomes: dict[str, int]) -> None:
        """Checks that all answers were complete, where nothing but orchestrators was struck."""
        failed = {outcome: count for outcome, count in outcomes.items() if outcome != "complete"}
        if self.spares_nodes and failed:
            self._checks.violated(BrokenPromise.SPARED, f"answers ended otherwise: {failed}")

    # Instructions to nodes.

    def _watch(self, process: Process, deployed: DeployedModels) -> None:
        name, follow, change = process.name.partition(".")[0], deployed.follow, deployed._change
        self._deployed[name] = (process, deployed)
        self._ends.pop(name, None)

        def followed(instruction: Instruction) -> None:
            self._accepts(name, deployed, instruction)
            follow(instruction)

        def changed(model: str, wanted: Any, run: Callable[..., Any]) -> None:
            served = deployed._served.get(model)
            # What a node was started with is taken over as it is; a drained node goes back to that.
            taken_over = wanted is None or served is None or not (wanted.choice.revision and served.model.choice.revision)
            if taken_over or model != FIRST_MODEL or model in deployed._changes:
                change(model, wanted, run)
                return
            revision = wanted.choice.revision
            self._changes(name, revision)
            change(model, wanted, run)
            deployed._changes[model].add_done_callback(lambda _: self._ends.__setitem__(name, (self._now, revision)))

        deployed.follow, deployed._change = followed, changed  # type: ignore[method-assign, assignment]

    def _accepts(self, node: str, deployed: DeployedModels, instruction: Instruction) -> None:
        leader = instruction.leader
        _, before = self._heard.get(node, (0.0, LeaderEpoch()))
        if leader.is_stale_after(before):
            self._checks.violated(BrokenPromise.EPOCH, f"{node} obeys {leader.epoch} after {before.epoch}")
        self._heard[node] = (self._now, leader)
        self.reached_leaders.add(leader)
        acts = _acts(deployed, instruction)
        if not acts:
            return
        self._cluster.record.say("ACT", node=node, epoch=leader.epoch, leader=leader.leader_id[:6], acts=acts)
        if leader.epoch < self._moved.epoch and self._plan.alike and not self._forgets:
            self._checks.violated(
                BrokenPromise.TWO_LEADERS, f"epoch {leader.epoch} has {node} {acts[0]} after {self._moved.epoch} acted"
            )
        self._moved = max(self._moved, leader)

    def _changes(self, node: str, revision: int) -> None:
        """Checks, when a node begins to change the first model, how many others do."""
        members = len(self._cluster.nodes)
        bound = max(1, int(self._plan.max_unavailable * members))
        spacing_s = MIN_READY_S / max(self._plan.rates)
        busy = [
            other
            for other, (process, deployed) in self._deployed.items()
            if other != node and process.alive and not _is_drained(deployed) and self._is_changing(other, revision, spacing_s)
        ]
        if len(busy) >= bound:
            self._checks.violated(BrokenPromise.ROLLOUT, f"{node} changes {FIRST_MODEL} while {busy} do, of {members}")
        self._ends[node] = (math.inf, revision)

    def _is_changing(self, node: str, revision: int, spacing_s: float) -> bool:
        """Whether a node changes the first model, or has done so to this revision only just."""
        ended, to = self._ends.get(node, (-math.inf, 0))
        return ended == math.inf or (to == revision and self._now - ended < spacing_s)

    # What was accepted.

    def _look_at_stored(self, kind: str, name: str, said: list[Said]) -> None:
        if kind == "drains" and not self.spares_nodes:
            return  # a drain is of one process of the node
        row = self._redis.hash_of(_KEY.format(kind)).get(name)
        revision = None if row is None else said_of(json.loads(row)) if kind == "deployments" else name
        fits = may_be(said, revision or "", self._redis.forgot_at)
        key = f"{kind} {name}"
        if not fits and key not in self._lost:
            self._lost.add(key)
            self._checks.violated(BrokenPromise.ACCEPTED, f"{key} is {revision}, {said[-1]} was said")

    def _look_at_refusals(self) -> None:
        """Checks that a new leader has the refusals of the one before, for no longer than that one had them."""
        leading = [each.process for each in self._cluster.orchestrators if each.process and services.is_leading(each.process)]
        control = services.control_of(leading[0]) if len(leading) == 1 else None
        if control is None:
            return
        now, found = self._now, control._reconciler._sources.refusals._failures
        awake = leading[0].run(control._reconciler._sources.refusals._now)
        if control.leader != self._refusing:
            self._refusing = control.leader
            for key, (since, ends, refusal) in self._refused.items():
                self._compare(control, key, self._refusing_at - since, ends - now + awake, refusal)
        self._refusing_at = now
        can_store = self._redis.answers(leading[0])
        self._refused = {
            key: (
                # What became known while Redis does not answer the leader, that one cannot store.
                self._refused[key][0] if key in self._refused and can_store else now,
                now + each.expires - awake,
                Refusal(each.incarnation, each.revision),
            )
            for key, each in found.items()
        }

    def _compare(self, control: ControlPlane, key: tuple[str, str], held_s: float, ends: float, refusal: Refusal) -> None:
        """Compares what a new leader has with a refusal that the one before it had until `ends` of the new one's clock."""
        node, model = key
        deployment, found = control._catalog.find(model), control._reconciler._sources.refusals._failures.get(key)
        present = control._registry.incarnation(node)
        if self._forgets or held_s < _STORED_S or deployment is None or deployment.revision != refusal.revision:
            return
        if self._redeployed_at.get(model, -math.inf) >= self._refusing_at:
            return
        if present not in (None, refusal.incarnation):
            return
        self._checks.reach("refusals taken over")
        if found is None:
            self._checks.violated(BrokenPromise.ACCEPTED, f"the next leader does not know that {node} refused {model}")
        elif found.expires > ends + _LONGER_S:
            self._checks.violated(BrokenPromise.ACCEPTED, f"the next leader counts that {node} refused {model} for longer")

    def _on_line(self, line: Any) -> None:
        if line.event == "deployed":
            self._num_deployed += 1
            self._redeployed_at[str(line.fields["model"])] = self._now
            if self._num_deployed > self._operator.desires.num_asked:
                self._checks.violated(BrokenPromise.ACCEPTED, "a deployment was carried out twice")

    @property
    def _redis(self) -> SimulatedRedis:
        (redis,) = services.REDIS
        return redis

    @property
    def _now(self) -> float:
        return self._cluster.loop.now


def may_be(said: list[Said], value: str, forgot_at: Sequence[float]) -> bool:
    """Whether a value may be stored, empty for none, after what was said and the times at which Redis forgot.

    It is the last one that was accepted and that Redis cannot have forgotten, or one said later. Without such a one nothing may
    be stored, too.
    """
    # It was written between the question and the answer.
    kept = [
        number
        for number, each in enumerate(said)
        if each.sure and not any(each.asked_at <= at and at - FORGETS_S <= each.at for at in forgot_at)
    ]
    if not kept and not value:
        return True
    return any(each.value is None or each.value == value for each in said[kept[-1] if kept else 0 :])


def _acts(deployed: DeployedModels, instruction: Instruction) -> list[str]:
    """Returns what an instruction makes a node do: loads, unloads, drains. Nothing: it keeps what it has."""
    acts = []
    served = {name: each.model.choice for name, each in deployed._served.items()}
    for each in instruction.deployments:
        choice = served.get(each.model)
        following = deployed._served[each.model].agent.operations.replacement if choice is not None else None
        refused = deployed._refused.get(each.model)
        if refused is not None and refused[0].choice == ModelChoice.at(each.path, each.model, each.revision):
            continue
        wanted_choice = ModelChoice.at(each.path, each.model, each.revision)
        on_its_way = following is not None and following.state is not NodeState.FAILED and following.choice == wanted_choice
        if choice is None:
            acts.append(f"load {each.model}")
        elif choice.revision and wanted_choice not in (choice, deployed._left.get(each.model)) and not on_its_way:
            acts.append(f"change {each.model} to {each.revision}")
    wanted = {each.model for each in instruction.deployments}
    acts += [
        f"unload {name}" for name in served if name not in wanted and name != FIRST_MODEL and name not in deployed._leaving
    ]
    if instruction.drain != _is_drained(deployed):
        acts.append("drain" if instruction.drain else "undrain")
    return acts


def _is_drained(deployed: DeployedModels) -> bool:
    """Whether the orchestrator has the node drain."""
    return any("orchestrator" in each for each in deployed._models.first.node.drains)
