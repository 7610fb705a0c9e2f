"""The models that operators deploy: measured by nodes, checked, stored, then in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from ryzanstein import errors
from ryzanstein.cluster import Deployment, Node
from ryzanstein.orchestrator.deploying.store_writes import MAX_PENDING_WRITES, StoreWrites
from ryzanstein.orchestrator.placing.unplaceable import irreplaceable, unplaceable
from ryzanstein.orchestrator.reconcile import Reconciler, Sources
from ryzanstein.orchestrator.state.adapters import AdapterTable
from ryzanstein.orchestrator.state.stored import StateStore
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

log = structlog.get_logger(__name__)

_KEPT_KEYS = 8


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """How a model is deployed.

    `reload`: nodes load the files again, although the directory is the same. `rollback`: the directory is the one before the
    present one, and all else as it is. `allow_outage`: see `Catalog.revised`. `idempotency_key`: that of the request and of
    its repeats; empty: it has none.
    """

    reload: bool = False
    rollback: bool = False
    allow_outage: bool = False
    idempotency_key: str = ""


DEFAULT_OPTIONS = DeployOptions()


class ModelDeployments:
    """Changes the catalog. Cancelling a caller does not cancel its write: a deployment is stored and in force, or neither.

    `settling`: whether the members are not known yet. `measure_s`: how long nodes may take to measure a directory.
    """

    def __init__(
        self,
        sources: Sources,
        reconciler: Reconciler,
        adapters: AdapterTable,
        *,
        store: StateStore,
        writes: StoreWrites,
        telemetry: OrchestratorTelemetry,
        settling: Callable[[], bool],
        measure_s: float,
    ) -> None:
        self._sources, self._reconciler, self._adapters = sources, reconciler, adapters
        self._store, self._writes, self._telemetry = store, writes, telemetry
        self._settling, self._measure_s = settling, measure_s
        self._measuring = 0

    async def deploy(self, deployment: Deployment, options: DeployOptions) -> Deployment:
        """Adds or replaces a deployment; returns it with its revision when it is stored.

        Nodes measure a new directory first, for some seconds. Raises RESOURCE_EXHAUSTED or FAILED_PRECONDITION when none can
        take it, or none can change to it. A repeat of a request that was carried out changes nothing.
        """
        if (done := self._done(deployment.model, options)) is not None:
            return done
        if options.rollback:
            deployment = self._earlier(deployment.model)
        known = self._sources.catalog.find(deployment.model)
        if options.reload or known is None or known.path != deployment.path:
            await self._measure(deployment, options)
        return await self._writes.write(self._deploy(deployment, options))

    async def remove(self, model: str) -> None:
        """Removes a deployment; returns when that is stored. Raises NOT_FOUND when there is none."""
        await self._writes.write(self._remove(model))

    def _done(self, model: str, options: DeployOptions) -> Deployment | None:
        """Returns the deployment if this request for it was carried out before.

        An answer may be lost. A leader may also be refused what it has written: the store repeats a write whose answer was
        lost, and another leader has begun meanwhile.
        """
        known = self._sources.catalog.find(model)
        return known if known is not None and options.idempotency_key in known.idempotency_keys else None

    def _earlier(self, model: str) -> Deployment:
        """Returns the deployment of a model as it is, with its earlier directory.

        Raises NOT_FOUND when there is no deployment, FAILED_PRECONDITION when it had no other directory.
        """
        catalog = self._sources.catalog
        catalog.require(model)
        known = catalog.find(model)
        assert known is not None
        if not known.earlier_path:
            raise errors.failed_precondition(
                "NO_EARLIER_REVISION", f"{model!r} cannot be rolled back: it has had no directory but {known.path[:256]}"
            )
        return replace(known, path=known.earlier_path)

    def _measurable(self) -> Iterable[Node]:
        """Returns the nodes that can say how much memory a directory needs, and may be chosen."""
        return [node for node in self._sources.registry.nodes() if node.plural and not node.drain_requested]

    async def _measure(self, deployment: Deployment, options: DeployOptions) -> None:
        """Waits until nodes have measured a directory. Raises when none of them can serve it, or change to it."""
        if self._measuring >= MAX_PENDING_WRITES:
            raise errors.queue_full(self._measuring, MAX_PENDING_WRITES)
        self._measuring += 1
        try:
            await self._sources.needs.measured(deployment.path, self._measurable, self._measure_s)
            if self._settling():
                return
            await self._reconciler.prepare()
            if shortages := self._reconciler.without_room_for(deployment):
                raise unplaceable(deployment, shortages)
            revised = self._sources.catalog.revised(deployment, options.reload, allow_outage=options.allow_outage)
            if why := self._reconciler.irreplaceable(revised):
                raise irreplaceable(revised, why)
        finally:
            self._measuring -= 1

    async def _deploy(self, deployment: Deployment, options: DeployOptions) -> Deployment:
        model, catalog = deployment.model, self._sources.catalog
        if self._adapters.find(model) is not None:
            raise errors.already_exists("adapter", model)
        if (done := self._done(model, options)) is not None:
            return done
        if options.rollback:
            measured, deployment = deployment, self._earlier(model)
            if (measured.revision, measured.path) != (deployment.revision, deployment.path):
                raise errors.RyzansteinError(
                    f"{model!r} was deployed anew meanwhile", errors.Code.ABORTED, "DEPLOYED_MEANWHILE"
                )
        catalog.admit(deployment)
        deployment = catalog.revised(deployment, options.reload, allow_outage=options.allow_outage)
        if options.idempotency_key:
            keys = (*deployment.idempotency_keys, options.idempotency_key)
            deployment = replace(deployment, idempotency_keys=keys[-_KEPT_KEYS:])
        await self._store.put_deployment(deployment)
        self._sources.refusals.forget(model)
        self._sources.halts.lift(model)
        self._reconciler.invalidate()
        catalog.put(deployment)
        self._telemetry.deployments.set(len(catalog.deployments()))
        log.info("deployed", model=model, path=deployment.path, revision=deployment.revision, replicas=deployment.replicas)
        return deployment

    async def _remove(self, model: str) -> None:
        catalog = self._sources.catalog
        catalog.require(model)
        await self._store.remove_deployment(model)
        catalog.remove(model)
        self._telemetry.deployments.set(len(catalog.deployments()))
        log.info("deployment removed", model=model)
