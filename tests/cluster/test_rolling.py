"""Every node is drained and taken back in turn, as for an upgrade, while clients read."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ryzanstein.cli.rollout.drain import drain_node, request_drain, undrain_node, withdraw_drain

pytestmark = [pytest.mark.cluster, pytest.mark.long]

QUESTIONS = ("Count from 1 to 60.", "What is your name?", "Hello!")


class Load:
    """Clients that ask without a pause, each in sessions of its own; what they saw is compared in the end."""

    def __init__(self, harness: Any, num_clients: int) -> None:
        self._harness = harness
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.answered: list[str] = []
        self._expected = {question: self._ask(question, "").token_ids for question in QUESTIONS}
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, question: str, user: str) -> Any:
        return self._harness.client.chat(question, user=user, max_tokens=60, ignore_eos=True)

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            question, turn = QUESTIONS[turn % len(QUESTIONS)], turn + 1
            try:
                answer = self._ask(question, f"{number}-{turn}")
            except Exception as error:
                self.failures.append(repr(error))
                return
            if answer.token_ids != self._expected[question]:
                self.failures.append(f"another answer to {question!r} from {answer.nodes}")
            self.answered.append(answer.nodes[-1])


def nodes(harness: Any) -> list[str]:
    return [name for name in harness.cluster.services if name.startswith("node")]


def test_draining_every_node_in_turn_loses_nothing(pair: Any, holds: Any) -> None:
    orchestrator = pair.cluster.orchestrator_address
    with Load(pair, 3) as load:
        for node in nodes(pair):
            asyncio.run(request_drain(orchestrator, node))
            pair.cluster.wait_nodes(1, 10)
            assert holds(lambda node=node: pair.status(node).beat.load.running == 0, 20)
            before = len(load.answered)
            assert holds(lambda before=before: len(load.answered) > before + 6, 20)
            assert node not in load.answered[before + 3 :], "a drained node answered"
            asyncio.run(withdraw_drain(orchestrator, node))
            pair.wait_at_least(2)
    assert load.failures == []
    assert len(load.answered) > 12


def test_a_node_that_was_asked_itself_is_drained_and_taken_back(pair: Any) -> None:
    first = nodes(pair)[0]
    address = pair.cluster.services[first].grpc_address
    assert asyncio.run(drain_node(address, 5.0)) == 0
    assert pair.status(first).beat.reason == "draining: requested by an operator"
    pair.cluster.wait_nodes(1, 10)
    assert asyncio.run(undrain_node(address)) == ""
    pair.wait_at_least(2)
