"""Opens what an orchestrator's settings name: the store, the lease, and the lead."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = structlog.get_logger(__name__)

_NO_REDIS = "store redis needs the redis package: pip install ryzanstein[redis]"


def opened_redis(url: str) -> Redis:
    """Returns a client of a Redis server. Raises StoreError where the package is missing."""
    try:
        # An optional dependency: installed only where it is used.
        from ryzanstein.storage.redis_client import redis_client
    except ImportError as error:
        raise StoreError(f"{_NO_REDIS} ({error})") from error
    return redis_client(url)


NewRedis = Callable[[str], "Any"]
"""Makes a client of the Redis server at a URL; see `opened_redis`."""


@asynccontextmanager
async def opened_store(
    settings: OrchestratorSettings, telemetry: OrchestratorTelemetry, new_redis: NewRedis = opened_redis
) -> AsyncIterator[StateStore]:
    """Yields the store. Raises StoreError when it cannot be opened."""
    if settings.store == "redis":
        store = await _redis_store(settings, telemetry, new_redis)
    else:
        store = await Store.open(settings.database, telemetry)
    try:
        yield store
    finally:
        await store.close()


async def leadership_of(
    settings: OrchestratorSettings, store: StateStore, telemetry: OrchestratorTelemetry, new_redis: NewRedis = opened_redis
) -> Leadership:
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
    provider = _kubernetes(settings, times) if settings.leader_election == "kubernetes" else _redis_lease(settings, new_redis)
    log.info("standing by", leader_election=settings.leader_election, leader_id=election.leader_id, address=at)
    lead = ElectedLeadership(settings, store, telemetry, Campaign(election, provider, telemetry, boot_s), boot_s)
    store.fenced = lead.fenced
    return lead


async def _redis_store(settings: OrchestratorSettings, telemetry: OrchestratorTelemetry, new_redis: NewRedis) -> StateStore:
    url = settings.redis_url.get_secret_value()
    client = new_redis(url)
    from ryzanstein.orchestrator.state.redis_store import RedisStore

    log.info("state in Redis", address=address(url))
    return await RedisStore.open(client, settings.redis_prefix, telemetry)


def _redis_lease(settings: OrchestratorSettings, new_redis: NewRedis) -> LeaseProvider:
    from ryzanstein.orchestrator.leading.providers.redis_lease import RedisLease

    return RedisLease(new_redis(settings.redis_url.get_secret_value()), settings.redis_prefix)


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
