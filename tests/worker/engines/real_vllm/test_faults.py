"""vLLM hangs while its health says 200, dies, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from tests.worker.engines.real_vllm.conftest import VllmServer

from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.worker.engines.vllm.board import VARIABLE

PROMPT = TokenPrompt((300, 7, 451, 12, 9))


async def test_a_stalled_engine_is_found_and_named_while_its_health_says_all_is_well(
    vllm: Any, start_node: Any, connect: Any, attempt: Any, health: Any
) -> None:
    node = start_node("--engine", vllm.url, "--model-name", "demo", "--health-port", "0", model=vllm.model)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        await link.run(attempt(prompt=PROMPT, max_tokens=16), 120)
        handle = await link.submit(attempt(prompt=PROMPT, max_tokens=400, ignore_eos=True))
        await link.wait(handle, lambda stream: len(stream.tokens()) > 3, 60)
        os.kill(vllm.core(), signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            stream = await link.wait(handle, lambda stream: stream.failed is not None, 30)
            found_s = time.monotonic() - stopped
            assert await asyncio.to_thread(vllm.health) == 200
            assert stream.failed.reason == "RANK_STALLED"
            assert stream.failed.node_fault
            assert found_s < 6, "2 s, or ten steps of this machine"
            assert await health(node.address, "engine", "NOT_SERVING") == "NOT_SERVING"
        finally:
            os.kill(vllm.core(), signal.SIGCONT)
        assert await health(node.address, "engine", "SERVING") == "SERVING"
        deadline = time.monotonic() + 60
        while sum(event["event"] == "ranks ready" for event in node.events) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        again = await link.run(attempt(prompt=PROMPT, max_tokens=16), 60)
        assert len(again.tokens()) == 16


@pytest.mark.timeout(900)
async def test_a_killed_engine_is_waited_for(model: Any, tmp_path: Any, start_node: Any, connect: Any, attempt: Any) -> None:
    server = VllmServer(model, tmp_path / "vllm.log")
    node = start_node("--engine", server.url, "--model-name", "demo", model=model)
    try:
        server.wait()
        node.wait_event("ranks ready", 120)
        async with connect(node.address) as link:
            handle = await link.submit(attempt(prompt=PROMPT, max_tokens=400, ignore_eos=True))
            await link.wait(handle, lambda stream: len(stream.tokens()) > 3, 60)
            killed = time.monotonic()
            os.kill(server.core(), signal.SIGKILL)
            stream = await link.wait(handle, lambda stream: stream.failed is not None, 30)
            assert time.monotonic() - killed < 12, "vLLM's own watch of its engine"
            assert stream.failed.reason in ("RANK_LOST", "ENGINE_UNREACHABLE", "RANK_STALLED")
    finally:
        server.close()


FAILING = """
import os
from pathlib import Path
from ryzanstein.worker.engines.vllm.inside.sampler import Sampler

class Failing(Sampler):
    def _apply_batch(self, logits):
        now = Path(os.environ["FAIL_NOW"])
        if self._places and now.exists():
            now.unlink()
            raise RuntimeError("as if by a defect")
        super()._apply_batch(logits)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("board", [True, False], ids=["counted", "not counted"])
async def test_no_token_of_vllm_takes_the_place_of_one_that_our_sampler_failed_to_decide(
    model: Any, tmp_path: Any, start_node: Any, connect: Any, attempt: Any, *, board: bool
) -> None:
    """Where the node sees a count, vLLM goes on; where nobody would know, it ends."""
    now, counted = tmp_path / "now", {VARIABLE: str(tmp_path / "board")} if board else {}
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "failing.py").write_text(FAILING)
    server = VllmServer(model, tmp_path / "log", sampler="failing:Failing", variables={"FAIL_NOW": str(now), **counted})
    flags = ["--engine-board", counted[VARIABLE]] if board else []
    node = start_node("--engine", server.url, "--engine-sampler", "require", *flags, "--model-name", "demo", model=model)
    try:
        server.wait()
        node.wait_event("ranks ready", 120)
        sampling = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 5}
        async with connect(node.address) as link:
            whole = (await link.run(attempt(**sampling), 120)).tokens()
            handle = await link.submit(attempt(**sampling))
            await link.wait(handle, lambda stream: len(stream.tokens()) > 3, 60)
            now.touch()
            stream = await link.wait(handle, lambda stream: stream.failed is not None, 60)
            assert 3 < len(stream.tokens()) < len(whole)
            assert stream.tokens() == whole[: len(stream.tokens())]
            if board:
                assert (stream.failed.reason, stream.failed.node_fault) == ("RANKS_UNSOUND", True)
                deadline = time.monotonic() + 60
                while sum(event["event"] == "ranks ready" for event in node.events) < 2:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.1)
                assert (await link.run(attempt(**sampling), 120)).tokens() == whole
            else:
                assert stream.failed.reason == "ENGINE_UNREACHABLE"
                server.process.wait(60)
    finally:
        server.close()
