"""The disk of a cluster's state and logs fills up in the run: nothing that was begun is lost, and no service ends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import Answer, AsyncClient, Text
from ryzanstein.demo import MODEL_DIR

pytestmark = pytest.mark.cluster


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def say(cluster: LocalCluster, text: str, kills: bool = False) -> Answer:
    """Asks in one session; kills the node that answers after 20 tokens if told to."""
    async with (
        AsyncClient(cluster.router_address, timeout_s=30) as client,
        client.stream(text, session="s", temperature=0.0) as stream,
    ):
        async for event in stream:
            if kills and isinstance(event, Text) and len(stream.answer.token_ids) >= 20:
                kills = False
                cluster.kill(event.node)
    return stream.answer


def test_answers_sessions_and_services_outlive_a_full_disk(small_disk: Path) -> None:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, state_dir=small_disk)) as cluster:
        asyncio.run(say(cluster, "My name is Zorvia."))
        filler = small_disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        counted = asyncio.run(say(cluster, "Count from 1 to 60.", kills=True))
        assert len(counted.nodes) == 2
        assert [move.cause for move in counted.moves] == ["link_lost"]
        assert counted.text.endswith("59 60")
        assert "Zorvia" in asyncio.run(say(cluster, "What is my name?")).text
        assert [service.running for service in cluster.services.values()].count(False) == 1, "the killed node alone"
        filler.unlink()
        cluster.restart(cluster.router_names[0])
        cluster.wait_nodes(1)
        assert "Zorvia" in asyncio.run(say(cluster, "What is my name?")).text
