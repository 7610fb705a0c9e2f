"""A node beside a server, where torch is not installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker.engines.stub_server import stub_server
from tests.worker.engines.test_remote_group import be_vllm

WITHOUT = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('ryzanstein.worker', run_name='__main__')"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-c", WITHOUT, "--grpc-port", "0", "--metrics-port", "0", *flags]


@pytest.mark.cluster
async def test_a_node_beside_a_server_needs_no_torch(demo_dir: Path) -> None:
    async with stub_server() as stub:
        be_vllm(stub)
        flags = ("--model", str(demo_dir), "--engine", stub.address)
        node = await asyncio.create_subprocess_exec(*command(*flags), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert node.stderr is not None
        try:
            async with asyncio.timeout(60):
                while json.loads(line := await node.stderr.readline())["event"] != "ranks ready":
                    assert line
        finally:
            node.terminate()
            await node.communicate()
        assert node.returncode == 0


def test_ranks_of_its_own_without_torch_are_refused_with_what_to_install(demo_dir: Path) -> None:
    done = subprocess.run(command("--model", str(demo_dir)), check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "engine: own needs torch: pip install 'ryzanstein[worker]'" in done.stderr
