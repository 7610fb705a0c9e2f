"""What the pages of all models of a node share: the bound on bytes a second, and the tiers."""

from __future__ import annotations

from collections.abc import Mapping

from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.worker.agent.pages.outbox import RateLimit
from ryzanstein.worker.agent.pages.store import PageStore
from ryzanstein.worker.agent.pages.tiers.disk_tier import DiskTier
from ryzanstein.worker.agent.pages.tiers.host_tier import HostTier
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.page_metrics import PageMetrics


class PageTraffic:
    """The traffic of pages of one node: with the nodes that are `known`, and its `tiers` by name, the fastest first.

    `metrics` counts what is done for all models. `dialer` reaches other nodes.
    """

    def __init__(self, settings: WorkerSettings, metrics: PageMetrics, dialer: Dialer = PLAIN) -> None:
        self.dialer = dialer
        self.rate, self.no_limit = RateLimit(settings.kv_replication_rate), RateLimit(0)
        self.known = KnownNodes(metrics.refuse_address)
        self.tiers: Mapping[str, PageStore] = _tiers(settings, metrics)


def _tiers(settings: WorkerSettings, metrics: PageMetrics) -> Mapping[str, PageStore]:
    tiers: dict[str, PageStore] = {}

    def corrupt() -> None:
        metrics.refuse("corrupt")

    if settings.kv_host_bytes:
        tiers["host"] = HostTier(settings.kv_host_bytes, metrics.tier_bytes.labels("host").set, corrupt)
    if settings.kv_disk_bytes:
        folder = settings.kv_disk_dir / settings.node_id.replace("/", "_")
        on_size = metrics.tier_bytes.labels("disk").set
        tiers["disk"] = DiskTier(folder, settings.kv_disk_bytes, on_size, corrupt, settings.tuning.kv_disk_keep_s)
    return tiers
