"""`ryzanstein debug` finds a request in a real cluster: at the router, at its node, and at that node's ranks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.v1 import inference_pb2 as inference

_FILES = ("requests.json", "stacks.txt", "versions.json", "settings.json", "metrics.txt")


@pytest.fixture
def debug(calm: Any) -> Callable[..., Any]:
    """Runs the command; returns its result."""

    def run(*arguments: str) -> Any:
        services = ("--router", calm.cluster.router_address, "--orchestrator", calm.cluster.orchestrator_address)
        return CliRunner().invoke(build(), ["debug", *arguments, *services])

    return run


def test_a_request_is_found_on_its_whole_way(calm: Any, debug: Callable[..., Any], tmp_path: Path) -> None:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="Count from 1 to 20.")],
        sampling=inference.SamplingParams(max_tokens=1900, ignore_eos=True),
    )
    call = calm.client.inference.StreamChat(
        inference.StreamChatRequest(chat=chat), metadata=(("x-request-id", "looked-for"),), timeout=60
    )
    try:
        started = next(call).event.started
        shown = debug("--request", "looked-for")
        assert shown.exit_code == 0, shown.output
        router, node, *ranks = shown.stdout.splitlines()
        assert f"generation {started.generation_id}, attempt 0: " in router
        assert f" on {started.node_id}, " in router
        assert node.startswith(f"{started.node_id}: generation {started.generation_id}, ")
        assert f"{started.prompt_tokens}/{started.prompt_tokens}" in node
        assert [line.partition(":")[0].strip() for line in ranks[:2]] == ["rank 0", "rank 1"]
        assert all(" step " in line and ".py, line " in line for line in ranks[:2])

        cluster = debug()
        assert cluster.stdout.startswith("silent for longest: request looked-for")
        assert "oldest requests" in cluster.stdout

        bundle = tmp_path / "bundle.zip"
        written = debug("--zip", str(bundle), "--state-dir", str(calm.cluster.state_dir))
        assert written.exit_code == 0, written.output
        _check_bundle(bundle, calm.cluster.router_names[0])
        again = debug("--zip", str(bundle))
        assert (again.exit_code, "is there already" in again.stderr) == (1, True)
    finally:
        call.cancel()


def _check_bundle(path: Path, router: str) -> None:
    with zipfile.ZipFile(path) as bundle:
        names = set(bundle.namelist())
        for service in (router, "node-0", "node-1", "orchestrator"):
            files = {
                f"{service}/{name}" for name in ("requests.json", "stacks.txt", "versions.json", "settings.json", "metrics.txt")
            }
            assert files | {f"logs/{service}.jsonl"} <= names
        assert json.loads(bundle.read("status.json"))["errors"] == {}
        assert "looked-for" in bundle.read("summary.txt").decode()
        assert "rank 1 of demo" in bundle.read("node-0/stacks.txt").decode()
        assert b'"generation accepted"' in bundle.read("logs/node-0.jsonl") + bundle.read("logs/node-1.jsonl")
        assert b"# HELP" in bundle.read("node-0/metrics.txt")
    assert path.stat().st_mode & 0o777 == 0o600


def test_all_stacks_of_a_service_are_shown_and_others_are_named(debug: Callable[..., Any]) -> None:
    node = debug("node-0")
    assert node.exit_code == 0, node.output
    assert "rank 1 of demo, process " in node.stdout
    assert "MainThread" in node.stdout
    assert "\ntask " in node.stdout
    unknown = debug("node-9")
    assert (unknown.exit_code, "node-0, node-1, orchestrator" in unknown.stderr) == (1, True)
    gone = debug("--request", "never")
    assert (gone.exit_code, "has a request or generation never" in gone.stderr) == (1, True)
