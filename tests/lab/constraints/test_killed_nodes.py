"""Random schemas on a real cluster whose nodes are killed in the middle of objects: every answer ends, and is valid.

The judge is jsonschema; the client asserts that every token comes once. A killed node starts again at once,
with no grammar compiled.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tests.cluster.conftest import Answer, Client, Harness
from tests.worker.constraints.random_schemas import random_schema

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

KILLS = 6
PAUSE_S = 2.0
ANSWER_S = 90.0
STOP = inference.FINISH_REASON_STOP


class Killer:
    """Kills the node of an answer that is in the middle of an object, and starts it again.

    One kill after the other, while at least two nodes serve: what was cut goes on somewhere at once.
    """

    def __init__(self, harness: Harness, starter: ThreadPoolExecutor) -> None:
        self._harness, self._starter = harness, starter
        self._one = threading.Lock()
        self._next = time.monotonic()
        self.killed: list[str] = []

    def strike(self, node_id: str) -> None:
        """Kills the node, unless one was killed lately or only one serves."""
        if not self._one.acquire(blocking=False):
            return
        try:
            if len(self.killed) < KILLS and time.monotonic() > self._next and self._harness.num_ready >= 2:
                os.kill(self._harness.cluster.services[node_id].pid, signal.SIGKILL)
                self.killed.append(node_id)
                self._starter.submit(self._harness.start_again, node_id).result()
                self._next = time.monotonic() + PAUSE_S
        finally:
            self._one.release()


@pytest.fixture(scope="module")
def starter() -> Iterator[ThreadPoolExecutor]:
    """A thread that outlives the tests: a service lives only as long as the thread that started it."""
    with ThreadPoolExecutor(1) as starter:
        yield starter


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=3, tp=1)) as cluster:
        harness = Harness(cluster)
        yield harness
        harness.client.close()


def ask(client: Client, killer: Killer, seed: int) -> Answer:
    """Reads the answer to a random schema; of every third one three choices. Strikes when an object has begun."""
    constraint = inference.Constraint(json_schema=json.dumps(random_schema(seed)))
    asked = {"seed": seed, "temperature": 1.0, "n": choices(seed), "constraint": constraint, "max_tokens": 300}
    request = inference.StreamChatRequest(chat=client.request("Hello!", **asked))
    answer = Answer()

    def strike(delta: inference.GenerationDelta) -> None:
        if delta.first_index > 4 and answer.choices[delta.choice].text.startswith("{"):
            killer.strike(delta.node_id)

    return client.read(client.inference.StreamChat(request, timeout=ANSWER_S), answer, strike)


def choices(seed: int) -> int:
    return 3 if seed % 3 == 0 else 1


def num_valid(answer: Answer, schema: dict[str, Any], n: int) -> int:
    """Asserts that all choices ended, and that those that ended by themselves are valid. Returns how many did."""
    assert len(answer.choices) == n
    assert {choice.reason for choice in answer.choices.values()} <= {STOP, inference.FINISH_REASON_LENGTH}
    ended = [choice for choice in answer.choices.values() if choice.reason == STOP]
    for choice in ended:
        jsonschema.validate(json.loads(choice.text), schema, cls=jsonschema.Draft202012Validator)
    return len(ended)


@pytest.mark.parametrize(("at_once", "seeds"), [(12, range(5000, 5100)), (100, range(5100, 5200))], ids=["few", "many"])
def test_every_answer_ends_and_is_valid_although_nodes_are_killed_in_the_middle(
    harness: Harness, starter: ThreadPoolExecutor, at_once: int, seeds: range
) -> None:
    harness.wait_at_least(3)
    killer, began = Killer(harness, starter), time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda seed: ask(harness.client, killer, seed), seeds))
    took_s = time.monotonic() - began
    valid = [num_valid(each, random_schema(seed), choices(seed)) for seed, each in zip(seeds, answers, strict=True)]
    all_choices = [choice for answer in answers for choice in answer.choices.values()]
    moved = sum(len(set(choice.nodes)) > 1 for choice in all_choices)
    print(f"{sum(valid)} of {len(all_choices)} ended, {len(killer.killed)} kills, {moved} moved, {took_s:.1f} s")
    assert sum(valid) > 0.9 * len(all_choices)
    assert len(killer.killed) > 1
    assert moved >= len(killer.killed), "hardly an answer was in the middle when its node was killed"
