"""Conversations that come back from tiers: to a node that was killed meanwhile, and after they were paused."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = pytest.mark.cluster

LONG = " ".join(f"Item {i} is number {7 * i}." for i in range(60))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_pages_come_back_from_disk_and_damaged_ones_do_not(tmp_path: Path, client_of: Any, holds: Any) -> None:
    flags = ("--kv-replication", "none", "--kv-disk-bytes", str(2**28), "--kv-disk-dir", str(tmp_path))
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=2, worker_flags=flags)) as cluster:
        client = client_of(cluster.router_address)

        def computed(text: str) -> int:
            answer = client.chat(text, session_id="s", max_tokens=8, ignore_eos=True)
            return int(answer.prompt_tokens - answer.usage.cached_prompt_tokens)

        def restart() -> None:
            cluster.restart("node-0")
            cluster.wait_nodes(1)

        assert computed(LONG) > 500
        pages = tmp_path / "node-0"
        assert holds(lambda: len(list(pages.glob("*/*"))) > 30, 10)
        restart()
        assert computed("And then?") < 100
        for path in pages.glob("*/*"):
            damage(path)
        restart()
        assert computed("Who says so?") > 500
        client.close()


def test_a_model_that_reads_everything_sparsely_gets_its_pages_back(tmp_path: Path, client_of: Any, holds: Any) -> None:
    sparse = ("--sparse-attention", "window=64,sinks=16")
    flags = (*sparse, "--kv-replication", "none", "--kv-disk-bytes", str(2**28), "--kv-disk-dir", str(tmp_path))
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, worker_flags=flags)) as cluster:
        client = client_of(cluster.router_address)

        def ask(text: str) -> Any:
            return client.chat(text, session_id="s", max_tokens=8, ignore_eos=True)

        assert ask(LONG).usage.cached_prompt_tokens < 100
        assert holds(lambda: len(list((tmp_path / "node-0").glob("*/*"))) >= 5, 10)
        cluster.restart("node-0")
        cluster.wait_nodes(1)
        again = ask("And then?")
        assert again.prompt_tokens - again.usage.cached_prompt_tokens < 100
        client.close()


def test_a_paused_answer_comes_back_from_memory_with_the_same_tokens(client_of: Any) -> None:
    flags = ("--kv-host-bytes", str(2**28), "--num-blocks", "72")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=2, worker_flags=flags)) as cluster:
        clients = [client_of(cluster.router_address) for _ in range(2)]

        def ask(number: int, session_id: str) -> list[int]:
            given = {"session_id": session_id, "max_tokens": 400, "temperature": 0.7, "seed": number, "ignore_eos": True}
            return list(clients[number].chat(f"I am number {number}. {LONG}", **given).token_ids)

        alone = [ask(number, f"alone-{number}") for number in range(2)]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(ask, range(2), ("one", "two")))
        assert together == alone
        with urllib.request.urlopen(cluster.services["node-0"].metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        resumed = 'ryzanstein_worker_paused_choices_resumed_total{by="tier",model="demo"} '
        assert [float(line.removeprefix(resumed)) > 0 for line in lines if line.startswith(resumed)] == [True]
        for client in clients:
            client.close()
