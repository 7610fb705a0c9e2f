"""A vLLM that the node starts: its processes are killed one by one and stopped, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.worker.engines.real_vllm.conftest import GPU_FLAGS, VLLM
from tests.worker.engines.real_vllm.test_continuation import BASE, CASES, assert_is_rest, cut

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import TokenPrompt

PROMPT = TokenPrompt((300, 7, 451, 12, 9))
ARGUMENTS = " ".join(["--dtype float32 --max-model-len 2048 --enforce-eager", *GPU_FLAGS])
SAMPLED: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "max_tokens": 24}


TEN = list(CASES)[:10]
DIGITS = Constraint.regex("[0-9]{40}")


def processes(node: Any, name: str) -> list[psutil.Process]:
    """Those of the node whose name begins so."""
    below = psutil.Process(node.process.pid).children(recursive=True)
    return [each for each in below if Path(f"/proc/{each.pid}/comm").read_text().startswith(name)]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def num_ready(node: Any) -> int:
    return sum(event["event"] == "ranks ready" for event in node.events)


async def until(condition: Any, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(0.05)


@pytest.mark.timeout(900)
async def test_whatever_is_killed_or_stopped_it_is_found_and_started_again(
    model: Path, start_node: Any, connect: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    before = shared_memory()
    flags = ("--engine", "vllm", "--engine-python", str(VLLM), "--engine-args", ARGUMENTS, "--model-name", "demo")
    quick = ("--tuning", '{"recovery": {"crash_limit": 100, "loss_limit": 100}}')
    node = start_node(*flags, *quick, model=model)
    node.wait_event("ranks ready", 300)
    took = {}
    async with connect(node.address) as link:
        expected = (await link.run(attempt(**SAMPLED), 120)).tokens()
        strikes = [("VLLM::Engine", signal.SIGKILL), ("VLLM::Engine", signal.SIGSTOP), ("python", signal.SIGKILL)]
        for turn, (name, number) in enumerate(strikes, 1):
            handle = await link.submit(attempt(prompt=PROMPT, max_tokens=1900, ignore_eos=True))
            await link.wait(handle, lambda stream: len(stream.tokens()) > 3, 60)
            server = [each for each in processes(node, name) if "keeper.py" not in " ".join(each.cmdline())]
            os.kill(server[0].pid, number)
            struck = time.monotonic()
            stream = await link.wait(handle, lambda stream: stream.failed is not None, 30)
            took[turn] = time.monotonic() - struck
            reasons = ["RANK_STALLED"] if number == signal.SIGSTOP else ["RANK_LOST", "ENGINE_UNREACHABLE"]
            assert stream.failed.reason in reasons, stream.failed
            await until(lambda turn=turn: num_ready(node) == turn + 1, 300)
            assert (await link.run(attempt(**SAMPLED), 120)).tokens() == expected
    print({turn: round(seconds, 2) for turn, seconds in took.items()})
    assert took[1] < 1
    assert took[2] < 4
    below = psutil.Process(node.process.pid).children(recursive=True)
    node.process.send_signal(signal.SIGTERM)
    await until(lambda: node.process.poll() is not None, 60)
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert shared_memory() <= before


@pytest.mark.timeout(900)
async def test_two_ranks_compute_as_one_and_the_one_that_hangs_is_named(
    model: Path, start_node: Any, connect: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    flags = ("--engine", "vllm", "--engine-python", str(VLLM), "--engine-args", ARGUMENTS, "--model-name", "demo")
    node = start_node(*flags, "--tp", "2", model=model)
    own = start_node("--model-name", "demo", model=model, tp=1)
    node.wait_event("ranks ready", 300)
    own.wait_event("ranks ready")
    async with connect(node.address) as link, connect(own.address) as ours:
        for params in [{**BASE, **CASES[name]} for name in TEN] + [{**SAMPLED, "constraint": DIGITS}]:
            got, expected = await link.run(attempt(**params), 120), await ours.run(attempt(**params), 60)
            assert got.rows == expected.rows
            for at in (1, 11, 23):
                if (known := cut(expected, params.get("n", 1), at)) is None:
                    continue
                for other in (link, ours):
                    assert_is_rest(await other.run(attempt(known=known, number=1, **params), 120), expected, known)
        assert len(processes(node, "VLLM::Worker")) == 2
        for turn, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            handle = await link.submit(attempt(prompt=PROMPT, max_tokens=1900, ignore_eos=True))
            await link.wait(handle, lambda stream: len(stream.tokens()) > 3, 60)
            os.kill(processes(node, "VLLM::Worker")[1].pid, number)
            struck = time.monotonic()
            stream = await link.wait(handle, lambda stream: stream.failed is not None, 30)
            took = time.monotonic() - struck
            assert stream.failed.reason == ("RANK_LOST" if number == signal.SIGKILL else "RANK_STALLED")
            assert took < (1 if number == signal.SIGKILL else 6), "2 s, or ten steps of this machine"
            await until(lambda turn=turn: num_ready(node) == turn + 1, 300)
    (lost,) = [event for event in node.events if event["event"] == "ranks lost" and event["cause"] == "RANK_STALLED"]
    assert lost["rank"] == 1
    assert "rank 1 is stopped in step" in lost["reason"]
