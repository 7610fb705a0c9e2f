"""Random schemas while nodes are killed in the middle of objects: every answer ends, is valid, and the same as without."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tests.cluster.conftest import Answer, Client
from tests.worker.constraints.random_schemas import random_schema

from ryzanstein.cli.processes import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

SEEDS = range(2000, 2100)
AT_ONCE = 4
# Each of these kills the node that answers it, once it is in the middle of an object.
KILLERS = frozenset(SEEDS[::10])

pytestmark = pytest.mark.cluster


class Killer:
    """Kills one node at a time, and starts it again before the next."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self._one = cluster, threading.Lock()
        self.killed: list[str] = []

    def strike(self, node_id: str) -> None:
        with self._one:
            self.killed.append(node_id)
            self._cluster.kill(node_id)
            self._cluster.restart(node_id)
            self._cluster.wait_nodes(2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    flags = ("--crash-limit", "1000", "--loss-limit", "1000")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, worker_flags=flags)) as started:
        yield started


def answer_to(cluster: LocalCluster, seed: int, killer: Killer | None) -> Answer:
    client, strikes = Client(cluster.router_address), list[threading.Thread]()

    def look(delta: inference.GenerationDelta) -> None:
        if killer is not None and seed in KILLERS and delta.first_index >= 5 and not strikes:
            strikes.append(threading.Thread(target=killer.strike, args=(delta.node_id,)))
            strikes[0].start()

    constraint = inference.Constraint(json_schema=json.dumps(random_schema(seed)))
    params: dict[str, Any] = {"constraint": constraint, "seed": seed, "temperature": 1.0, "max_tokens": 300, "n": 1 + seed % 3}
    try:
        return client.chat("Hello!", user=str(seed), on_delta=look, **params)
    finally:
        for strike in strikes:
            strike.join()
        client.close()


@pytest.mark.timeout(600)
def test_a_hundred_schemas_with_nodes_killed_in_the_middle(cluster: LocalCluster) -> None:
    killer = Killer(cluster)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        undisturbed = list(threads.map(lambda seed: answer_to(cluster, seed, None), SEEDS))
        struck = list(threads.map(lambda seed: answer_to(cluster, seed, killer), SEEDS))
    assert len(killer.killed) >= len(KILLERS) // 2, "most of those answers have more than a few tokens"
    ended = moved = 0
    for seed, before, after in zip(SEEDS, undisturbed, struck, strict=True):
        for number, choice in after.choices.items():
            assert choice.token_ids == before.choices[number].token_ids, seed
            assert choice.reason == before.choices[number].reason, seed
            if choice.reason == inference.FINISH_REASON_STOP:
                jsonschema.validate(json.loads(choice.text), random_schema(seed), cls=jsonschema.Draft202012Validator)
                ended += 1
            moved += len(set(choice.nodes)) > 1
    assert ended > 150
    assert moved > 0, "no answer was in its middle when its node was killed"
