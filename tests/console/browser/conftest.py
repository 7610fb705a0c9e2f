"""The browser, a real cluster, and a console of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.pages.chromium import Chromium, chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess


@pytest.fixture
async def browser() -> AsyncIterator[Chromium]:
    async with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes of one rank, two routers; each test leaves all of them ready."""
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=3, num_routers=2, tp=1)) as made:
        yield made


@pytest.fixture
def real_console(cluster: LocalCluster, start_console: Callable[..., ConsoleProcess]) -> ConsoleProcess:
    """A console of the cluster."""
    routers = ",".join(cluster.services[name].grpc_address for name in cluster.router_names)
    return start_console(routers, orchestrator=cluster.services["orchestrator"].grpc_address)
