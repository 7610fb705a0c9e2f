"""A reserve node among real processes: it continues what the other node loses, and gives the conversation back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.cluster.conftest import Harness
from tests.cluster.test_failover import QUESTION, SAMPLED, Strike, assert_equal

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.demo import MODEL_DIR

REGULAR, RESERVE = "node-0", "node-1"


@pytest.fixture(scope="module")
def mixed() -> Iterator[Harness]:
    """A regular node and a reserve."""
    spec = ClusterSpec(
        MODEL_DIR, num_nodes=2, tp=1, hosts={RESERVE: replace(LOCAL, prefix=("/usr/bin/env", "RYZANSTEIN_RESERVE=true"))}
    )
    with LocalCluster(spec) as cluster:
        harness = Harness(cluster)
        yield harness
        harness.client.close()


@pytest.mark.timeout(180)
@pytest.mark.long
def test_the_reserve_continues_an_answer_and_the_next_turn_goes_back(mixed: Harness) -> None:
    mixed.cluster.wait_nodes(2)
    undisturbed = mixed.client.chat(QUESTION, **SAMPLED)
    for number in range(8):
        assert mixed.client.chat("Hello", user=f"user-{number}", max_tokens=4).nodes == [REGULAR]
    answer = mixed.client.chat(QUESTION, session_id="tea", on_delta=Strike(mixed, 20, signal.SIGKILL), **SAMPLED)
    assert_equal(answer, undisturbed)
    assert answer.nodes == [REGULAR, RESERVE]
    mixed.start_again(REGULAR)
    deadline = time.monotonic() + 60
    while (nodes := mixed.client.chat("And then?", session_id="tea", max_tokens=4).nodes) != [REGULAR]:
        assert nodes == [RESERVE]
        assert time.monotonic() < deadline, "the conversation never returned"
        time.sleep(0.7)  # each turn makes the conversation longer
    assert mixed.client.chat("And then?", session_id="tea", max_tokens=4).nodes == [REGULAR]


@pytest.mark.timeout(120)
@pytest.mark.long
def test_status_shows_the_reserve(mixed: Harness) -> None:
    mixed.cluster.wait_nodes(2)
    cluster = mixed.cluster
    command = [sys.executable, "-P", "-m", "ryzanstein.cli", "status", "--json", "--router", cluster.router_address]
    run = subprocess.run([*command, "--orchestrator", cluster.orchestrator_address], capture_output=True, text=True, check=True)
    document, expected = json.loads(run.stdout), {REGULAR: False, RESERVE: True}
    assert {each["node"]["node_id"]: each["engine"]["reserve"] for each in document["nodes"]} == expected
    assert {each["node_id"]: each["engine"]["reserve"] for each in document["router"]["links"]} == expected
