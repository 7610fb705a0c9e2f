"""Opens what an orchestrator's settings name: the store, the lease, and the lead."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from ryzanstein.addresses import join_address, with_port
from ryzanstein.clock import boot_s
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.orchestrator.leadership import ElectedLeadership, Leadership, SoleLeadership
from ryzanstein.orchestrator.leading.campaign import Campaign
from ryzanstein.orchestrator.leading.election import Election
from ryzanstein.orchestrator.leading.lease import LeaseProvider, LeaseTimes
from ryzanstein.orchestrator.leading.providers.kubernetes_lease import ApiServer, KubernetesLease
from ryzanstein.orchestrator.leading.term import SoleTerm
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.stored import StateStore, StoreError
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.storage.redis_url import address

log = structlog.get_logger(__name__)

_NO_REDIS = "store redis needs the redis package: pip install ryzanstein[redis]"


@asynccontextmanager
async def opened_store(settings: OrchestratorSettings, telemetry: OrchestratorTelemetry) -> AsyncIterator[StateStore]:
    """Yields the store. Raises StoreError when it cannot be opened."""
    store = await (_redis_store if settings.store == "redis" else _sqlite_store)(settings, telemetry)
    try:
        yield store
    finally:
        await store.close()


async def leadership_of(settings: OrchestratorSettings, store: StateStore, telemetry: OrchestratorTelemetry) -> Leadership:
    """Returns what leads: at once where there is one orchestrator, else while it holds the lease.

    Raises StoreError when the service of the lease cannot be named.
    """
    if settings.leader_election == "none":
        term = await SoleTerm.begin(store, telemetry)
        store.fenced = term.fenced
        return SoleLeadership(await ControlPlane.restore(settings, store, telemetry, term))
    times = LeaseTimes()
    at = with_port(settings.advertise_address, settings.grpc_port if settings.tls == "off" else settings.tls_port)
    election = Election(uuid.uuid4().hex, at, boot_s, times)
    provider = _kubernetes(settings, times) if settings.leader_election == "kubernetes" else _redis_lease(settings)
    log.info("standing by", leader_election=settings.leader_election, leader_id=election.leader_id, address=at)
    lead = ElectedLeadership(settings, store, telemetry, Campaign(election, provider, telemetry, boot_s), boot_s)
    store.fenced = lead.fenced
    return lead


async def _sqlite_store(settings: OrchestratorSettings, telemetry: OrchestratorTelemetry) -> StateStore:
    return await Store.open(settings.database, telemetry)


async def _redis_store(settings: OrchestratorSettings, telemetry: OrchestratorTelemetry) -> StateStore:
    try:
        # An optional dependency: installed only where it is used.
        from ryzanstein.orchestrator.state.redis_store import RedisStore
        from ryzanstein.storage.redis_client import redis_client
    except ImportError as error:
        raise StoreError(f"{_NO_REDIS} ({error})") from error
    url = settings.redis_url.get_secret_value()
    log.info("state in Redis", address=address(url))
    return await RedisStore.open(redis_client(url), settings.redis_prefix, telemetry)


def _redis_lease(settings: OrchestratorSettings) -> LeaseProvider:
    from ryzanstein.orchestrator.leading.providers.redis_lease import RedisLease
    from ryzanstein.storage.redis_client import redis_client

    return RedisLease(redis_client(settings.redis_url.get_secret_value()), settings.redis_prefix)


def _kubernetes(settings: OrchestratorSettings, times: LeaseTimes) -> LeaseProvider:
    """Returns the Lease of the pod's namespace, at the API server that Kubernetes names in the environment."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = ApiServer(f"https://{join_address(host, port)}")
    try:
        if not host:
            raise OSError("KUBERNETES_SERVICE_HOST is not set")
        namespace = server.namespace
    except OSError as error:
        raise StoreError(f"leader_election kubernetes needs a pod with a service account: {error}") from error
    return KubernetesLease(server, namespace, settings.kubernetes_lease, times.lease_s, times.renew_s)
