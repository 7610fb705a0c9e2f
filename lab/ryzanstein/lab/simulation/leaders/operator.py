"""An operator of a cluster with several orchestrators: deploys, changes, removes, drains, and notes what was accepted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation.cluster import BROKEN, Cluster
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.rpc.client import PLAIN
from ryzanstein.rpc.status import answered
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

EXTRAS = ("extra-0", "extra-1")
TIMEOUT_S = 8.0
_UNSURE = ("UNAVAILABLE", "STORE_UNAVAILABLE", "DEADLINE_EXCEEDED", "STOPPING", "CANCELLED")
"""Whether it was carried out is unknown."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the operator asked of a model or node: what should be there, see `said_of`, or the node; empty: nothing.

    `sure`: it was accepted. None for what is not known.
    """

    asked_at: float
    at: float
    sure: bool
    value: str | None


def said_of(row: Mapping[str, Any]) -> str:
    """Returns what tells two states of a deployment apart."""
    return f"revision {row['revision']}, {row['replicas']} replicas"


@dataclass(slots=True)
class Desires:
    """What was asked, in order, by kind and name."""

    said: dict[tuple[str, str], list[Said]] = field(default_factory=dict)
    asking: tuple[str, str] | None = None
    """What is being asked now."""
    num_asked: int = 0
    """Deployments that were asked for."""

    def note(self, kind: str, name: str, said: Said) -> None:
        self.said.setdefault((kind, name), []).append(said)


class Operator:
    """Acts until the plan's duration is over. `run` it in a process of its own."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self.desires = Desires()
        self._drained = ""
        self._asked_at = 0.0

    async def run(self) -> None:
        leaders = self._cluster.plan.leaders
        assert leaders is not None
        loop = asyncio.get_running_loop()
        await asyncio.sleep(9.0)
        await self._deploy(FIRST_MODEL, 0)
        while loop.time() < self._cluster.plan.duration_s:
            await asyncio.sleep(self._rng.expovariate(1 / leaders.pause_s))
            await self._act()
        while self._drained:
            await self._drain("UndrainNode")
            await asyncio.sleep(1.0)

    async def _act(self) -> None:
        rng = self._rng
        match rng.choice(("change", "change", "change", "deploy", "deploy", "remove", "drain", "break")):
            case "change":
                await self._deploy(FIRST_MODEL, 0, reload=True)
            case "deploy":
                await self._deploy(rng.choice(EXTRAS), rng.randint(1, len(self._cluster.nodes)), reload=rng.random() < 0.5)
            case "remove":
                await self._remove(rng.choice((*EXTRAS, BROKEN)))
            case "drain":
                await self._drain("UndrainNode" if self._drained else "DrainNode")
            case "break":
                await self._deploy(BROKEN, len(self._cluster.nodes), reload=True)

    async def _deploy(self, model: str, replicas: int, *, reload: bool = False) -> None:
        self.desires.num_asked += 1
        deployment = pb.Deployment(model=model, path=str(MODEL_DIR), replicas=replicas)
        key = f"deployment {self.desires.num_asked}"
        request = pb.DeployModelRequest(deployment=deployment, reload=reload, idempotency_key=key)
        answer = await self._ask("deployments", model, "DeployModel", request)
        if answer is not None:
            stored = answer.deployment
            self._accepted("deployments", model, said_of({"revision": stored.revision, "replicas": stored.replicas}))

    async def _remove(self, model: str) -> None:
        if await self._ask("deployments", model, "RemoveModel", pb.RemoveModelRequest(model=model)) is not None:
            self._accepted("deployments", model, "")

    async def _drain(self, method: str) -> None:
        """Drains a node, or takes that back; one node at a time."""
        name = self._drained or self._rng.choice(self._cluster.nodes).name
        self._drained = name
        request = getattr(pb, f"{method}Request")(node_id=name)
        if await self._ask("drains", name, method, request) is not None:
            self._accepted("drains", name, name if method == "DrainNode" else "")
            self._drained = name if method == "DrainNode" else ""

    def _accepted(self, kind: str, name: str, value: str) -> None:
        self._note(kind, name, sure=True, value=value)

    def _note(self, kind: str, name: str, *, sure: bool, value: str | None) -> None:
        self.desires.asking = None
        self._cluster.record.say("OPERATOR", kind=kind, name=name, sure=sure, value=value)
        self.desires.note(kind, name, Said(self._asked_at, self._cluster.loop.now, sure, value))

    async def _ask(self, kind: str, name: str, method: str, request: Any) -> Any:
        """Returns the answer; None when there was none, or a refusal."""
        self.desires.asking, self._asked_at = (kind, name), self._cluster.loop.now
        async with PLAIN.open(self._cluster.orchestrator_addresses, Peer(PeerRole.ORCHESTRATOR)) as channel:
            try:
                return await answered(getattr(OrchestratorServiceStub(channel), method)(request, timeout=TIMEOUT_S))
            except RyzansteinError as error:
                self._cluster.record.say("OPERATOR refused", method=method, name=name, reason=error.reason)
                if error.reason in _UNSURE or error.code.name in _UNSURE:
                    self._note(kind, name, sure=False, value=None)
                self.desires.asking = None
                return None
