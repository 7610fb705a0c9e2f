"""A node that a router has no work for says little; a client must not notice when such a node is dead."""

from __future__ import annotations

import signal
import time
from typing import Any

import httpx
import pytest

from ryzanstein.worker.agent.routers import QUIET_AFTER_S

ASKED: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 5}


def beats(cluster: Any) -> dict[str, float]:
    """The beats that the router has had of each node."""
    lines = httpx.get(f"{cluster.http_url}/metrics").text.splitlines()
    counted = (line.rsplit(" ", 1) for line in lines if line.startswith("ryzanstein_router_beats_total{"))
    return {series: float(value) for series, value in counted}


def until_quiet(cluster: Any) -> None:
    """Returns when no node beats more often than it must."""
    deadline = time.monotonic() + 3 * QUIET_AFTER_S
    while True:
        before = beats(cluster)
        time.sleep(4.0)
        if all(num - before[series] <= 3 for series, num in beats(cluster).items()):
            return
        assert time.monotonic() < deadline


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_node_that_froze_while_it_was_quiet_is_found_by_its_first_request(stormy: Any) -> None:
    undisturbed = stormy.client.chat("Count from 1 to 60.", user="someone", **ASKED)
    (home,) = undisturbed.nodes
    until_quiet(stormy.cluster)
    before = beats(stormy.cluster)
    again = stormy.client.chat("Count from 1 to 60.", user="someone", **ASKED)
    assert again.nodes == undisturbed.nodes, "a quiet node is as usable as any other"
    assert again.token_ids == undisturbed.token_ids
    assert sum(beats(stormy.cluster).values()) > sum(before.values())

    until_quiet(stormy.cluster)
    stormy.cluster.kill(home, signal.SIGSTOP)
    began = time.monotonic()
    moved = stormy.client.chat("Count from 1 to 60.", user="someone", **ASKED)
    took_s = time.monotonic() - began
    stormy.cluster.kill(home, signal.SIGCONT)
    assert moved.token_ids == undisturbed.token_ids
    assert home not in moved.nodes
    assert took_s < 8, "it is not waited for as long as for a quiet node's next beat, and once more"
    stormy.cluster.wait_nodes(3)
