"""The desired deployments, by model name. Plain Python; each was written to the store before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ryzanstein import errors
from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.state.changes import DeploymentChanged, DeploymentRemoved, Publish


class Catalog:
    """A set of at most `max_deployments` deployments; each change is published."""

    def __init__(self, publish: Publish, max_deployments: int, saved: Iterable[Deployment] = ()) -> None:
        self._publish = publish
        self._max_deployments = max_deployments
        self._deployments = {deployment.model: deployment for deployment in saved}
        self.paths: frozenset[str] = frozenset()
        """The directories of all deployments."""
        self._note_paths()
        # The last revisions of removed models: nodes may still report them.
        self._removed: dict[str, int] = {}

    def deployments(self) -> tuple[Deployment, ...]:
        """Returns all deployments, by name."""
        return tuple(self._deployments[model] for model in sorted(self._deployments))

    def admit(self, deployment: Deployment) -> None:
        """Raises RESOURCE_EXHAUSTED when there is no room for one more."""
        if deployment.model not in self._deployments and len(self._deployments) >= self._max_deployments:
            raise errors.RyzansteinError(
                f"too many deployments: {len(self._deployments)}, the bound is {self._max_deployments}",
                errors.Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_DEPLOYMENTS",
                {"bound": str(self._max_deployments)},
            )

    def revised(self, deployment: Deployment, reload: bool, *, allow_outage: bool = False) -> Deployment:
        """Returns the deployment with its revision, one more when files are to be loaded, and its earlier directory.

        `allow_outage`: for the change to a new revision, and for no later one.
        """
        before = self._deployments.get(deployment.model)
        if before is None:
            revision = self._removed.get(deployment.model, 0) + 1
            return replace(deployment, revision=revision, earlier_path="", outage_revision=0, idempotency_keys=())
        earlier = before.earlier_path if before.path == deployment.path else before.path
        new = reload or before.path != deployment.path
        revision = before.revision + new
        outage = revision if new and allow_outage else before.outage_revision
        keys = before.idempotency_keys
        return replace(deployment, revision=revision, earlier_path=earlier, outage_revision=outage, idempotency_keys=keys)

    def put(self, deployment: Deployment) -> None:
        """Adds or replaces a deployment; publishes it if it is new or different."""
        if self._deployments.get(deployment.model) != deployment:
            self._deployments[deployment.model] = deployment
            self._note_paths()
            self._publish(DeploymentChanged(deployment))

    def find(self, model: str) -> Deployment | None:
        return self._deployments.get(model)

    def require(self, model: str) -> None:
        """Raises NOT_FOUND when there is no deployment of the model."""
        if model not in self._deployments:
            raise errors.not_found("deployment", model)

    def remove(self, model: str) -> None:
        """Removes a deployment. Raises NOT_FOUND when there is none."""
        self.require(model)
        self._removed.pop(model, None)
        self._removed[model] = self._deployments.pop(model).revision
        while len(self._removed) > self._max_deployments:
            del self._removed[next(iter(self._removed))]
        self._note_paths()
        self._publish(DeploymentRemoved(model))

    def _note_paths(self) -> None:
        self.paths = frozenset(deployment.path for deployment in self._deployments.values())
