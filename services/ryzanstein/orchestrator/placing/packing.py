"""The memory of a node, and which deployments fit into it. Pure; `placement` decides between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from ryzanstein.cluster import Deployment, ModelNeed, Node, NodeState

_GIB = 2**30
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class NodeShortage:
    """Why a node cannot take a deployment. `missing_bytes` is 0 when it does not lack memory."""

    node_id: str
    missing_bytes: int
    reason: str


class NodeRoom:
    """What is placed on a node. `needs` are the node's measurements, by directory.

    Deployments that are unloaded while idle share the room of the largest of them, since the node
    loads them on demand. An older node takes one deployment, whatever its size.
    """

    def __init__(self, node: Node, needs: Mapping[str, ModelNeed]) -> None:
        self.node = node
        self.placed: dict[str, Deployment] = {}
        self._needs = needs
        self._reports = {report.model: report for report in node.models}
        self._key = f"{node.node_id}\0".encode()
        self._stay_bytes = 0
        self._largest_idle_bytes = 0

    @property
    def blank(self) -> bool:
        """Whether the node has no model, and is no older one."""
        return not self._reports and self.node.plural

    @property
    def served(self) -> frozenset[str]:
        """The models that the node has, of any revision, and did not fail with."""
        if not self.node.plural:
            return frozenset() if self.node.state is NodeState.FAILED else frozenset({self.node.model})
        return frozenset(model for model, report in self._reports.items() if report.state is not NodeState.FAILED)

    def starts(self, deployment: Deployment) -> bool:
        """Whether the node loads this revision, or is to load it again, and answers no requests for the model meanwhile."""
        report = self._reports.get(deployment.model) if self.node.plural else None
        if report is None or report.asleep or report.revision != deployment.revision:
            return False
        return report.state in (NodeState.STARTING, NodeState.RECOVERING)

    def lacks(self, deployment: Deployment) -> tuple[bool, bool]:
        """Returns whether the node answers no requests for the model, and whether it has not this revision.

        An older node does not say which revision it has.
        """
        report = self.node.report(deployment.model)
        if report is None or not (report.state is NodeState.READY or (report.asleep and report.state is not NodeState.FAILED)):
            return True, True
        return False, not self.node.plural or report.revision != deployment.revision

    def fails(self, deployment: Deployment) -> bool:
        """Whether the node reports now that it failed with this revision of a deployment."""
        model = deployment.model
        if not self.node.plural:
            return self.node.state is NodeState.FAILED and self.node.model in ("", model)
        report = self._reports.get(model)
        return report is not None and report.state is NodeState.FAILED and report.revision == deployment.revision

    def memory(self, deployment: Deployment) -> int | None:
        """Returns the bytes that a deployment takes here; None if unknown or refused."""
        if self._reports:
            report = self._reports.get(deployment.model)
            if report is not None and report.state is not NodeState.FAILED and report.memory_bytes:
                return report.memory_bytes
        need = self._needs.get(deployment.path)
        return None if need is None or need.error else need.bytes

    def fits(self, deployment: Deployment) -> bool:
        (size,) = self.sizes([deployment])
        return self.fraction(deployment, size) is not None

    def sizes(self, deployments: Iterable[Deployment]) -> list[int]:
        """Returns the bytes that each deployment takes here, as `fraction` wants them: -1 if unknown or refused."""
        return [-1 if (size := self.memory(deployment)) is None else min(size, _LARGEST) for deployment in deployments]

    def fraction(self, deployment: Deployment, size: int) -> float | None:
        """Returns the part of the memory that deployments take once this one is here as well; None if it does not fit."""
        room = self.node.memory_bytes
        if room <= 0:  # an older node
            return None if self.placed else 1.0
        if size < 0 or (taken := self._with(deployment, size)) > room:
            return None
        return taken / room

    def displaces(self, deployment: Deployment) -> bool:
        """Whether a model that the node was started with gives way to the deployment."""
        size = self.memory(deployment) or 0
        stays = sum(
            report.memory_bytes
            for report in self.node.models
            if report.started_with and report.model != deployment.model and report.model not in self.placed
        )
        return self._with(deployment, size) + stays > self.node.memory_bytes

    def weight(self, model: bytes) -> bytes:
        """Returns the weight of this node for a model, whose name is given in UTF-8: the least is the best."""
        return blake2b(self._key + model, digest_size=8).digest()

    def put(self, deployment: Deployment) -> None:
        size = self.memory(deployment) or 0
        self.placed[deployment.model] = deployment
        if deployment.idle_unload_s:
            self._largest_idle_bytes = max(self._largest_idle_bytes, size)
        else:
            self._stay_bytes += size

    def shortage(self, deployment: Deployment) -> NodeShortage | None:
        """Returns why the deployment cannot be added here; None if it can."""
        node = self.node
        if node.drain_requested:
            return NodeShortage(node.node_id, 0, "draining")
        if self.fits(deployment):
            return None
        if not node.plural:
            return NodeShortage(node.node_id, 0, "an older node, which serves one deployment at a time")
        size = self.memory(deployment)
        if size is None:
            need = self._needs.get(deployment.path)
            return NodeShortage(node.node_id, 0, need.error if need is not None else "not measured yet")
        missing = self._with(deployment, size) - node.memory_bytes
        reason = f"needs {_gib(size)}, {_gib(max(0, size - missing))} of {_gib(node.memory_bytes)} are free"
        return NodeShortage(node.node_id, missing, reason)

    def _with(self, deployment: Deployment, size: int) -> int:
        if deployment.idle_unload_s:
            return self._stay_bytes + max(self._largest_idle_bytes, size)
        return self._stay_bytes + size + self._largest_idle_bytes


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
