"""What a node tells about its kernels: a gauge for each rank, and a line in its log where it has none."""

import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def gauges(node: Any, name: str = "native_kernels") -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=5) as response:
        page = response.read().decode()
    return [line for line in page.splitlines() if line.startswith(f"ryzanstein_worker_{name}{{")]


def test_a_node_with_kernels_says_so_for_each_rank(node: Any) -> None:
    assert gauges(node) == [f'ryzanstein_worker_native_kernels{{model="demo",rank="{rank}"}} 1.0' for rank in (0, 1)]
    invariant = [f'ryzanstein_worker_row_invariant{{model="demo",rank="{rank}"}} 1.0' for rank in (0, 1)]
    assert gauges(node, "row_invariant") == invariant
    assert node.wait_event("ranks ready")["kernels"] == "compiled for this machine"
    assert not {"native kernels unavailable", "outputs depend on batch composition"} & {line["event"] for line in node.events}


@pytest.mark.parametrize(
    ("compiler", "flags", "why"),
    [("/nonexistent", (), "no C compiler '/nonexistent'"), ("cc", ("--kernels", "torch"), "chosen")],
    ids=["no compiler", "chosen"],
)
def test_a_node_without_says_why(
    start_node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, compiler: str, flags: tuple[str, ...], why: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    node = start_node(*flags, tp=1)
    assert why in node.wait_event("native kernels unavailable")["reason"]
    assert gauges(node) == ['ryzanstein_worker_native_kernels{model="demo",rank="0"} 0.0']
    assert "depends on the batch" in node.wait_event("outputs depend on batch composition")["reason"]
    assert gauges(node, "row_invariant") == ['ryzanstein_worker_row_invariant{model="demo",rank="0"} 0.0']


def test_a_node_that_must_have_them_refuses_to_serve_without(
    start_node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    node = start_node("--kernels", "native", tp=1)
    assert "kernels native: no C compiler '/nonexistent'" in node.wait_event("model refused")["reason"]
