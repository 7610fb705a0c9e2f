"""A conversation that returns to a node which was killed meanwhile: its pages come from the disk, or are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes import ClusterSpec, LocalCluster
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
