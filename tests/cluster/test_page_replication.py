"""A node dies in the middle of an answer: its backup continues from its pages and computes almost nothing."""

from __future__ import annotations

import signal
import urllib.request
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

LONG = " ".join(f"Item {i} is number {7 * i}." for i in range(60))


def metric(harness: Any, node_id: str, name: str, **labels: str) -> float:
    """A metric of a node, 0 where it is absent."""
    with urllib.request.urlopen(harness.cluster.services[node_id].metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted + " ")), 0.0)


def prefilled(harness: Any, node_id: str) -> float:
    return metric(harness, node_id, "ryzanstein_worker_tokens_total", kind="prefill")


def test_the_backup_continues_from_pages_and_computes_almost_nothing(stormy: Any) -> None:
    assert_continues_almost_at_once(stormy, num_nodes=3)


def test_compressed_pages_are_replicated_too(compressed: Any) -> None:
    assert_continues_almost_at_once(compressed, num_nodes=2)


def assert_continues_almost_at_once(harness: Any, num_nodes: int) -> None:
    """Kills the node that answers. The answer is as without a fault, and its prompt is not computed again."""
    calm = harness.client.chat(LONG, session_id="calm", max_tokens=200, seed=5, temperature=0.7, ignore_eos=True)
    before: dict[str, float] = {}
    killed: list[str] = []

    def kill_late(delta: Any) -> None:
        if delta.first_index < 100 or killed:
            return
        killed.append(delta.node_id)
        harness.cluster.kill(delta.node_id, signal.SIGSTOP)  # so that it is not yet at the end when it is killed
        for node_id in harness.cluster.node_ids:
            if node_id != delta.node_id:
                before[node_id] = prefilled(harness, node_id)
        harness.cluster.kill(delta.node_id, signal.SIGKILL)

    answer = harness.client.chat(
        LONG, session_id="calm-2", on_delta=kill_late, max_tokens=200, seed=5, temperature=0.7, ignore_eos=True
    )
    assert answer.token_ids == calm.token_ids
    assert len(answer.nodes) == 2
    first, backup = answer.nodes
    assert killed == [first]
    assert answer.prompt_tokens > 500
    assert prefilled(harness, backup) - before[backup] < 64, "what was computed again"
    harness.start_again(first)
    harness.wait_at_least(num_nodes)
