"""The adapters that the orchestrator wants on this node: each agent is told those of its model."""

from __future__ import annotations

from pathlib import Path

from ryzanstein.adapters import DeployedAdapters
from ryzanstein.worker.agent.adapters.node_adapters import WantedAdapter
from ryzanstein.worker.agent.models import NodeModels


class AdapterFollower:
    """Keeps what the orchestrator said last, also for models that come later."""

    def __init__(self, models: NodeModels) -> None:
        self._models = models
        self._told = DeployedAdapters()

    @property
    def digest(self) -> bytes:
        """Of what the orchestrator said last."""
        return self._told.digest

    def follow(self, adapters: DeployedAdapters | None) -> None:
        """Takes what the orchestrator says, None if nothing new; and tells agents whose model has changed."""
        if adapters is not None:
            self._told = adapters
        for agent in self._models:
            node = agent.node
            if node.adapters.followed != (self._told.digest, node.model_name):
                wanted = {
                    each.name: WantedAdapter(Path(each.path), each.revision, each.pinned)
                    for each in self._told.adapters
                    if each.model == node.model_name
                }
                node.adapters.follow(wanted, (self._told.digest, node.model_name))
