"""How fast a new revision replaces an earlier one: what the orchestrator's settings say, and what a deployment says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from ryzanstein.cluster import Deployment


@dataclass(frozen=True, slots=True)
class RolloutBounds:
    """How fast a new revision replaces an earlier one. Deployments may state the first four otherwise."""

    max_unavailable: Annotated[float, Field(gt=0, le=1)] = 0.10
    """Share of a model's replicas that may change at once; at least one."""
    min_ready_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long a replica must be ready before its place in the wave is free, in seconds."""
    progress_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long replicas may change without any progress until no further one begins, in seconds."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of the replicas that may fail; before the first one is ready, none may."""
    headroom: Annotated[float, Field(ge=1, le=10)] = 1.2
    """What stays ready must hold so many times what ran and waited in the last minute."""

    def of(self, deployment: Deployment) -> RolloutBounds:
        """Returns the bounds for a deployment. A share of 0 that may change stays 0, and see `floor` for that."""
        limits = deployment.rollout
        given = {
            "max_unavailable": limits.max_unavailable,
            "min_ready_s": limits.min_ready_s,
            "progress_s": limits.progress_s,
            "max_failed": limits.max_failed,
        }
        stated = {name: value for name, value in given.items() if value is not None}
        return replace(self, **stated) if stated else self

    def places(self, deployment: Deployment, num_members: int) -> int:
        """Returns how many replicas may change at once. Where none may be away, these load beside, or others stand in."""
        share = self.of(deployment).max_unavailable or self.max_unavailable
        return max(1, int(share * num_members))

    def floor(self, deployment: Deployment, num_members: int) -> int:
        """Returns how many replicas must stay ready whatever is asked of them.

        A model that should have one replica keeps it, unless an outage is allowed: another node stands in, or none can change.
        """
        least = deployment.min_replicas
        if deployment.allows_outage or (self.of(deployment).max_unavailable and deployment.replicas != 1):
            return least
        return max(least, min(deployment.limit or num_members, num_members))
