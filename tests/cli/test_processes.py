"""What starting a cluster does when things are in its way."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ryzanstein.cli.processes import cluster as processes
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.host import Host
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.cli.status import scrape
from ryzanstein.demo import MODEL_DIR
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter

pytestmark = pytest.mark.cluster

SMALL = ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)


def test_a_port_that_somebody_took_meanwhile_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stolen = [taken.getsockname()[1]]

        def ports(count: int) -> list[int]:
            chosen = free_ports(count)
            return [stolen.pop() if stolen else chosen[0], *chosen[1:]]

        monkeypatch.setattr(processes, "free_ports", ports)
        with LocalCluster(SMALL) as cluster:
            assert stolen == []
            assert str(taken.getsockname()[1]) not in cluster.orchestrator_address
            assert all(service.running for service in cluster.services.values())


def test_a_model_that_cannot_be_loaded_fails_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterSpec(tmp_path, num_nodes=1, tp=1))
    with pytest.raises(ServiceFailedError, match=r"node-0 (cannot serve|ended with exit code 1): .*config\.json"):
        cluster.start()
    assert cluster.services == {}


def test_state_is_kept_where_it_was_asked_for_and_goes_where_it_was_not(tmp_path: Path) -> None:
    temporary, kept = LocalCluster(SMALL), LocalCluster(ClusterSpec(MODEL_DIR, state_dir=tmp_path / "state"))
    directory = temporary.state_dir
    assert directory.is_dir()
    assert kept.state_dir.is_dir()
    temporary.stop()
    kept.stop()
    assert not directory.exists()
    assert (tmp_path / "state").is_dir()


def test_a_cluster_on_ipv6_behind_proxies_that_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    names = (processes.ORCHESTRATOR, "node-0", "router-0")
    spec = replace(SMALL, hosts=dict.fromkeys(names, Host("::1")))
    with LocalCluster(spec) as cluster:
        assert cluster.router_address.startswith("[::1]:")
        for service in cluster.services.values():
            assert scrape.total(service.metrics_url, "process_start_time_seconds") > 0
        found = asyncio.run(look(cluster.orchestrator_address, KeyedRouter(cluster.router_address)))
        assert [each.node.address for each in found.nodes] == [cluster.services["node-0"].grpc_address]
