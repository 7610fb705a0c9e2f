"""Which models a node should serve: a pure function of the orchestrator's instruction.

A node serves what is deployed to it, and what it was started with as far as that fits beside it.
The orchestrator computes by the same rule what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Instruction
from ryzanstein.worker.agent.model_host import ModelChoice


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model to serve. It may sleep after `idle_unload_s` without work; 0: never."""

    choice: ModelChoice
    idle_unload_s: float = 0.0


def wanted_models(
    instruction: Instruction, started_with: Sequence[ModelChoice], need: Callable[[str], int], memory_bytes: int
) -> dict[str, WantedModel]:
    """Returns the models that the node should serve, by name.

    `need` returns the bytes that the model in a directory takes. What the node was started with
    gives way to deployments, the last first. An older orchestrator knows only the first model: its
    deployment takes that model's place.
    """
    wanted = {each.model: _wanted(each) for each in instruction.deployments}
    kept = started_with if instruction.plural or not wanted else started_with[1:]
    free = memory_bytes - _taken(wanted, need)
    for choice in kept:
        size = need(choice.path)
        if choice.name not in wanted and (not instruction.deployments or not instruction.plural or size <= free):
            wanted[choice.name] = WantedModel(choice)
            free -= size
    return wanted


def _wanted(deployment: Deployment) -> WantedModel:
    choice = ModelChoice.at(deployment.path, deployment.model, deployment.revision)
    return WantedModel(choice, deployment.idle_unload_s)


def _taken(wanted: dict[str, WantedModel], need: Callable[[str], int]) -> int:
    """Returns the bytes of all that stay loaded, and of the largest one that may sleep."""
    stay = sum(need(each.choice.path) for each in wanted.values() if not each.idle_unload_s)
    return stay + max((need(each.choice.path) for each in wanted.values() if each.idle_unload_s), default=0)
