"""Nodes are killed and frozen in the middle of answers; the client must not be able to tell."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from ryzanstein.v1 import inference_pb2 as inference

GREEDY: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "logprobs": 2}
SAMPLED: dict[str, Any] = {
    "max_tokens": 90,
    "ignore_eos": True,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 2026,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 20,
    "logprobs": 2,
}
QUESTION = "Count from 1 to 60."


def assert_equal(answer: Any, undisturbed: Any) -> None:
    """Token ids, text, log probabilities, reason and usage; the stream's indices were asserted while reading."""
    for choice, expected in undisturbed.choices.items():
        seen = answer.choices[choice]
        assert seen.token_ids == expected.token_ids
        assert seen.text == expected.text
        assert seen.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert seen.reason == expected.reason
    assert answer.usage.completion_tokens == undisturbed.usage.completion_tokens
    assert answer.usage.prompt_tokens == undisturbed.usage.prompt_tokens


class Strike:
    """Sends a signal to the answering node when a given index of choice 0 arrives, once."""

    def __init__(self, harness: Any, index: int, number: signal.Signals) -> None:
        self.harness, self.index, self.number = harness, index, number
        self.victim = ""

    def __call__(self, delta: inference.GenerationDelta) -> None:
        if not self.victim and delta.choice == 0 and delta.first_index + len(delta.token_ids) > self.index:
            self.victim = delta.node_id
            self.harness.cluster.kill(self.victim, self.number)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.lab), pytest.param(SAMPLED, id="sampled")]
)
@pytest.mark.long
def test_a_node_killed_at_any_index_changes_nothing(stormy: Any, params: dict[str, Any]) -> None:
    undisturbed = stormy.client.chat(QUESTION, **params)
    assert len(undisturbed.token_ids) == 90
    moved = 0
    for index in (0, 1, 2, 3, 7, 15, 16, 31, 47, 64, 80):
        stormy.wait_at_least(2)
        strike = Strike(stormy, index, signal.SIGKILL)
        answer = stormy.client.chat(QUESTION, user=f"victim-{index}", on_delta=strike, **params)
        assert_equal(answer, undisturbed)
        moved += len(answer.nodes) == 2
        stormy.start_again(strike.victim)
    assert moved >= 8, "the node must have died before its last token in most runs"
    stormy.cluster.wait_nodes(3)


@pytest.mark.timeout(180)
def test_three_choices_survive_a_killed_node(stormy: Any) -> None:
    params = {**SAMPLED, "n": 3}
    undisturbed = stormy.client.chat(QUESTION, **params)
    stormy.cluster.wait_nodes(3)
    strike = Strike(stormy, 20, signal.SIGKILL)
    answer = stormy.client.chat(QUESTION, on_delta=strike, **params)
    assert answer.choices.keys() == {0, 1, 2}
    assert_equal(answer, undisturbed)
    stormy.cluster.restart(strike.victim)
    stormy.cluster.wait_nodes(3)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_frozen_node_changes_nothing_also_when_it_thaws(stormy: Any, params: dict[str, Any]) -> None:
    undisturbed = stormy.client.chat(QUESTION, **params)
    stormy.cluster.wait_nodes(3)
    strike = Strike(stormy, 10, signal.SIGSTOP)
    started = time.monotonic()
    answer = stormy.client.chat(QUESTION, on_delta=strike, **params)
    assert time.monotonic() - started < 10
    assert_equal(answer, undisturbed)
    stormy.cluster.kill(strike.victim, signal.SIGCONT)
    assert_equal(stormy.client.chat(QUESTION, **params), undisturbed)
    stormy.cluster.wait_nodes(3)


@pytest.mark.long
def test_a_stop_string_that_spans_the_break_is_found(stormy: Any) -> None:
    """It is so long that half of the answer ends within it."""
    stop = [" ".join(map(str, range(10, 41)))]
    undisturbed = stormy.client.chat(QUESTION, stop=stop)
    assert undisturbed.text == "1 2 3 4 5 6 7 8 9 "
    stormy.cluster.wait_nodes(3)
    strike = Strike(stormy, len(undisturbed.token_ids) // 2, signal.SIGKILL)
    answer = stormy.client.chat(QUESTION, stop=stop, on_delta=strike)
    assert_equal(answer, undisturbed)
    stormy.cluster.restart(strike.victim)
    stormy.cluster.wait_nodes(3)


def test_a_session_is_remembered_on_another_node(stormy: Any) -> None:
    first = stormy.client.chat("My name is Tavik.", session_id="moved")
    stormy.cluster.kill(first.node_id)
    answer = stormy.client.chat("What is my name?", session_id="moved")
    assert "Tavik" in answer.text
    assert answer.node_id != first.node_id
    stormy.cluster.restart(first.node_id)
    stormy.cluster.wait_nodes(3)


@pytest.mark.timeout(180)
@pytest.mark.long
def test_a_killed_rank_changes_nothing_and_the_node_serves_again(pair: Any, holds: Any) -> None:
    undisturbed = pair.client.chat(QUESTION, **GREEDY)
    victim: list[str] = []

    def kill_rank(delta: inference.GenerationDelta) -> None:
        if not victim and delta.first_index >= 5:
            victim.append(delta.node_id)
            import os

            os.kill(pair.status(delta.node_id).ranks[1].pid, signal.SIGKILL)

    answer = pair.client.chat(QUESTION, on_delta=kill_rank, **GREEDY)
    assert_equal(answer, undisturbed)
    pair.cluster.wait_nodes(2, 60)
    assert pair.status(victim[0]).rank_restarts == 1
    assert any("rank" in line["event"] and line.get("rank") == 1 for line in pair.log_of(victim[0]))
    served = [pair.client.chat(QUESTION, user=f"again-{i}", **GREEDY) for i in range(8)]
    assert victim[0] in {again.node_id for again in served}
    for again in served:
        assert_equal(again, undisturbed)


@pytest.mark.long
def test_without_the_orchestrator_nothing_happens(pair: Any) -> None:
    undisturbed = pair.client.chat(QUESTION, **GREEDY)

    def strike(delta: inference.GenerationDelta) -> None:
        pair.cluster.kill("orchestrator")

    assert_equal(pair.client.chat(QUESTION, on_delta=strike, **GREEDY), undisturbed)
    nodes = {pair.client.chat("Hello!", session_id=f"headless-{i}").node_id for i in range(12)}
    assert nodes == set(pair.cluster.node_ids)
    pair.cluster.restart("orchestrator")
    time.sleep(1.0)
    assert_equal(pair.client.chat(QUESTION, **GREEDY), undisturbed)
    pair.cluster.wait_nodes(2)


@pytest.mark.long
def test_a_router_that_restarts_still_remembers_the_session_and_its_node(pair: Any) -> None:
    first = pair.client.chat("My name is Oruna.", session_id="kept")
    pair.cluster.restart("router-0")
    pair.cluster.wait_nodes(2)
    answer = pair.new_client().chat("What is my name?", session_id="kept")
    assert "Oruna" in answer.text
    assert answer.node_id == first.node_id


@pytest.mark.long
def test_a_drained_node_finishes_its_work_and_takes_no_more(pair: Any, holds: Any) -> None:
    import grpc

    from ryzanstein.v1 import orchestrator_pb2 as orchestrator
    from ryzanstein.v1 import orchestrator_pb2_grpc as orchestrator_grpc

    undisturbed = pair.client.chat(QUESTION, **GREEDY)
    drained: list[str] = []

    def drain(delta: inference.GenerationDelta) -> None:
        if not drained:
            drained.append(delta.node_id)
            with grpc.insecure_channel(pair.cluster.orchestrator_address) as channel:
                stub = orchestrator_grpc.OrchestratorServiceStub(channel)
                stub.DrainNode(orchestrator.DrainNodeRequest(node_id=delta.node_id), timeout=5)

    assert_equal(pair.client.chat(QUESTION, on_delta=drain, **GREEDY), undisturbed)
    pair.cluster.wait_nodes(1, 10)
    nodes = {pair.client.chat("Hello!", session_id=f"drained-{i}").node_id for i in range(8)}
    assert drained[0] not in nodes
