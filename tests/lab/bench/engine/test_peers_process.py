from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from ryzanstein.lab.bench.engine.peers.environment import process_environment
from ryzanstein.lab.bench.engine.peers.process import PeerFailed, PeerProcess
from ryzanstein.lab.bench.engine.peers.runners.protocol import Settings

ECHO = """
import os, subprocess, sys, time
from runners.protocol import RunnerAnswer, serve
class Echo:
    facts = {"note": "x"}
    def __init__(self, settings):
        print("a line on standard output that is no answer")
        os.system("echo another")
        self.child = subprocess.Popen(["sleep", "300"]) if settings.quantization == "child" else None
    def generate(self, prompts, new_tokens):
        if new_tokens == 0: raise ValueError("nothing to do")
        if new_tokens == 1: print("Traceback", file=sys.stderr); os._exit(7)
        if new_tokens == 2: time.sleep(300)
        if new_tokens == 3:
            print("Traceback: RuntimeError: no heads of 24", file=sys.stderr, flush=True)
            raise OSError("a process of mine ended")
        last = [prompt[-1] for prompt in prompts]
        return RunnerAnswer(0.5, 2.0, len(prompts) * new_tokens, len(prompts) * (new_tokens - 1), last)
serve(Echo, ["pip"])
"""
SETTINGS = Settings("", "none", tp=1, threads=1, cores=[0], max_batch=1, max_tokens=9, cache_bytes=1)


def echo(timeout_s: float = 30.0, quantization: str = "none") -> PeerProcess:
    command = (sys.executable, "-c", ECHO, json.dumps(asdict(replace(SETTINGS, quantization=quantization))))
    return PeerProcess(command, process_environment(1), timeout_s)


async def test_an_answer_becomes_a_timing_whatever_is_printed_beside_it() -> None:
    async with echo() as peer:
        timing = await peer.generate([[1, 2], [3, 4]], 5)
    assert (timing.total_tokens_per_s, timing.decode_tokens_per_s, timing.ttft_s) == (5.0, 8 / 1.5, 0.5)
    assert timing.first_tokens == (2, 4)
    assert timing.peak_rss_bytes > 2**20
    assert timing.cpu_s > 0
    assert set(peer.facts) == {"pip", "note"}


async def test_an_exception_is_named() -> None:
    async with echo() as peer:
        with pytest.raises(PeerFailed, match="ValueError: nothing to do"):
            await peer.generate([[1]], 0)


async def test_an_error_in_a_process_of_the_peers_own_is_named_beside_it() -> None:
    with pytest.raises(PeerFailed) as failure:
        async with echo() as peer:
            await peer.generate([[1]], 3)
    assert str(failure.value) == "OSError: a process of mine ended (RuntimeError: no heads of 24)"


async def test_a_crash_is_reported_with_its_exit_code_and_last_line() -> None:
    async with echo() as peer:
        with pytest.raises(PeerFailed, match="ended with 7: Traceback"):
            await peer.generate([[1]], 1)


async def test_silence_is_bounded() -> None:
    with pytest.raises(PeerFailed, match="no answer within 2 s"):
        async with echo(timeout_s=2.0) as peer:
            await peer.generate([[1]], 2)


async def test_settings_that_the_runner_does_not_take_fail_at_the_start() -> None:
    peer = PeerProcess((sys.executable, "-c", ECHO, "{}"), process_environment(1), 30.0)
    with pytest.raises(PeerFailed, match="TypeError"):
        await peer.__aenter__()


async def test_nothing_that_a_peer_started_outlives_its_turn() -> None:
    async with echo(quantization="child") as peer:
        children = psutil.Process(peer.pid).children()
        assert [child.name() for child in children] == ["sleep"]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_peer_sees_the_runners_and_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    variables = process_environment(3)
    assert (Path(variables["PYTHONPATH"]) / "runners" / "protocol.py").exists()
    assert variables["OMP_NUM_THREADS"] == "3"
    assert "VIRTUAL_ENV" not in variables
    assert variables["PATH"] == os.environ["PATH"]
