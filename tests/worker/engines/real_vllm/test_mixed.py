"""A vLLM dies or hangs in the middle of an answer, and a node of ours in reserve goes on: the answer is the undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.worker.engines.answering import answer_of
from tests.worker.engines.real_vllm.conftest import VllmServer

from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec, LocalCluster

LONG: dict[str, Any] = {"max_tokens": 480}
SCHEMA = {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 40}'}
ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "sampled": {**LONG, "temperature": 1.0, "seed": 3, "top_p": 0.95},
    "penalties": {
        **LONG,
        "temperature": 1.0,
        "seed": 4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "three choices": {**LONG, "temperature": 1.0, "seed": 5, "n": 3},
    "JSON schema": {"max_tokens": 80, "temperature": 1.0, "seed": 7, "ignore_eos": False, "constraint": SCHEMA},
    "bad words and a bias": {**LONG, "temperature": 1.0, "seed": 6, "bad_words": ["the"], "logit_bias": {5: 4.0}},
}


def until_it_answers(cluster: LocalCluster) -> None:
    """Returns when the router sends requests to the node beside vLLM again: its breaker may be open for some seconds."""
    cluster.wait_nodes(2, 120)
    deadline = time.monotonic() + 60
    while answer_of(cluster, max_tokens=1)[1] != ["node-0"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def struck(cluster: LocalCluster, core: int, number: int, **sampling: Any) -> tuple[dict[int, list[int]], list[str]]:
    """An answer whose server is struck. It is asked for again where vLLM was done before."""
    for _ in range(10):
        tokens, nodes = answer_of(cluster, lambda _: os.kill(core, number), at=3, **sampling)
        if number == signal.SIGSTOP:
            os.kill(core, signal.SIGCONT)
        if len(nodes) > 1 or number == signal.SIGKILL:
            break
    return tokens, nodes


def seen_by(cluster: LocalCluster) -> str:
    """What the router and the agent beside vLLM wrote last: why the node in reserve had anything to do."""
    return "\n".join(cluster.services[name].log_tail(30) for name in (*cluster.router_names, "node-0", "orchestrator"))


@pytest.mark.timeout(900)
def test_a_node_in_reserve_continues_what_vllm_began(vllm: VllmServer, model: Path) -> None:
    """The server is stopped and goes on, so that it need not load again; the last time it is killed."""
    spec = ClusterSpec(model, num_nodes=2, tp=1, engines=(vllm.url, OWN_RANKS))
    with LocalCluster(spec) as cluster:
        whole = {}
        for name, sampling in ANSWERS.items():
            whole[name], nodes = answer_of(cluster, **sampling)
            assert nodes == ["node-0"], seen_by(cluster)
        for name, sampling in ANSWERS.items():
            tokens, nodes = struck(cluster, vllm.core(), signal.SIGSTOP, **sampling)
            assert nodes == ["node-0", "node-1"], name
            assert tokens == whole[name], name
            until_it_answers(cluster)
        tokens, nodes = struck(cluster, vllm.core(), signal.SIGKILL, **ANSWERS["penalties"])
        assert nodes == ["node-0", "node-1"]
        assert tokens == whole["penalties"]
