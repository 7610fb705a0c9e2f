"""Processes of a vLLM are killed at every token of an answer; another node goes on, and the answer is the undisturbed one.

By default at three tokens, with RYZANSTEIN_KILLS_EVERY=1 at all of them: 90 minutes, with `-o faulthandler_timeout=3600`.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.worker.engines.answering import answer_of
from tests.worker.engines.real_vllm.conftest import GPU_FLAGS, VLLM

from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec, LocalCluster
from ryzanstein.worker.engines.child.litter import present

INDICES = range(1, 32, int(os.environ.get("RYZANSTEIN_KILLS_EVERY", "15")))
ARGUMENTS = " ".join(["--dtype float32 --max-model-len 512 --enforce-eager", *GPU_FLAGS])
SCHEMA = {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 40}'}
SAMPLED = {"temperature": 1.0, "seed": 2026, "max_tokens": 360}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 360},
    "temperature": SAMPLED,
    "top-p": {**SAMPLED, "top_p": 0.9},
    "top-k": {**SAMPLED, "top_k": 20},
    "min-p": {**SAMPLED, "min_p": 0.05},
    "penalties": {**SAMPLED, "presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "greedy penalties": {"max_tokens": 360, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "min tokens and stops": {**SAMPLED, "min_tokens": 300, "ignore_eos": False, "stop_token_ids": [*range(0, 4096, 70)]},
    "bias": {**SAMPLED, "logit_bias": {5: 6.0, 9: -100.0}},
    "three choices": {**SAMPLED, "n": 3},
    "allowed tokens": {**SAMPLED, "allowed_token_ids": [*range(100, 140)]},
    "bad words": {**SAMPLED, "bad_words": ["the", "a", "er"]},
    "JSON schema": {**SAMPLED, "ignore_eos": False, "constraint": SCHEMA},
    "log probabilities": {**SAMPLED, "logprobs": 2},
}
TRIES = 20
VICTIMS = {"engine core": "VLLM::Engine", "API server": "python", "second rank": "VLLM::Worker"}


@pytest.fixture(params=["engine core", "API server", "second rank"])
def victims(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalCluster, str]]:
    """Two nodes that each start a vLLM of one rank; or one of two ranks, and a node of ours in reserve."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    pair = request.param != "second rank"
    if not pair:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    quick = '{"recovery": {"crash_limit": 1000, "loss_limit": 1000}}'
    flags = {"engine_python": str(VLLM), "engine_args": ARGUMENTS, "tuning": quick, "tp": 1 if pair else 2}
    engines = ("vllm", "vllm" if pair else OWN_RANKS)
    settings = {f"node-{i}": flags for i, engine in enumerate(engines) if engine == "vllm"}
    with LocalCluster(ClusterSpec(model, num_nodes=2, tp=1, engines=engines, settings=settings, still_s=300)) as cluster:
        yield cluster, request.param


def processes(cluster: LocalCluster, node_id: str, name: str) -> list[psutil.Process]:
    """Those of a node whose name begins so, without the one that keeps them."""
    found = []
    for each in psutil.Process(cluster.services[node_id].pid).children(recursive=True):
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            is_keeper = each.cmdline()[1:2] == ["-I"]
            if Path(f"/proc/{each.pid}/comm").read_text().startswith(name) and not is_keeper:
                found.append(each)
    return found


@pytest.mark.timeout(3600)
def test_an_answer_goes_on_wherever_its_engine_is_killed(victims: tuple[LocalCluster, str]) -> None:
    cluster, victim = victims
    before, cases = present(), itertools.cycle(CASES.items())
    whole = {name: answer_of(cluster, **sampling)[0] for name, sampling in CASES.items()}
    slowest, num_moved = 0.0, 0
    for at in INDICES:
        name, sampling = next(cases)
        struck: list[float] = []

        def strike(node_id: str, struck: list[float] = struck) -> None:
            found = processes(cluster, node_id, VICTIMS[victim])
            if found:  # there is none where the node in reserve answers, while the other one seems silent
                os.kill(found[0 if victim == "API server" else -1].pid, signal.SIGKILL)
                struck.append(time.monotonic())

        for _ in range(TRIES):
            tokens, nodes = answer_of(cluster, strike, at=at, **sampling)
            assert tokens == whole[name], (name, at)
            if struck:
                break
            time.sleep(1.0)
        num_moved += len(nodes) > 1
        slowest = max(slowest, time.monotonic() - struck[0])
        print(f"{victim} at token {at}: {name}, {'moved' if len(nodes) > 1 else 'was complete'}", flush=True)
        time.sleep(0.5)  # the node may not know it yet, if the answer was complete
        cluster.wait_nodes(2, 300)
    print(f"{victim}: {len(INDICES)} kills, {num_moved} answers moved, all equal; the rest took {slowest:.2f} s at most")
    assert num_moved >= len(INDICES) // 2, "the others were complete before the kill"
    cluster.stop()
    assert present() <= before
