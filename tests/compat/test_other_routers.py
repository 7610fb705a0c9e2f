"""A router of another version with nodes of today."""

from __future__ import annotations

from typing import Any

import pytest
from tests.compat.conftest import Line, Peer, Processes

pytestmark = pytest.mark.long

QUESTION = {"messages": [{"role": "ROLE_USER", "content": "Count from 1 to 20."}]}
HELLO = {"router_id": "other", "beat_interval": "1s"}
MANY = 400


def connected(processes: Processes, address: str, version: str = "earlier") -> tuple[Peer, Line]:
    """A router's stream, and the hello of the node when it is ready."""
    router = processes.call(address, "WorkerService/Connect", version, hello=HELLO)
    return router, router.until(lambda frame: "hello" in frame)[-1]


def submit(handle: int, model: str = "demo", max_tokens: int = 24) -> dict[str, Any]:
    sampling = {"temperature": 0, "seed": 5, "n": 1, "max_tokens": max_tokens, "ignore_eos": True}
    fields = {"handle": handle, "generation_id": f"g-{handle}", "model": model, "messages": QUESTION, "sampling": sampling}
    return {"submit": {**fields, "time_left": "60s"}}


def ends(handle: int) -> Any:
    return lambda frame: any(
        row["handle"] == handle for kind in ("finished", "failed") for row in frame.get("output", {}).get(kind, ())
    )


def tokens(frames: list[Line], handle: int) -> list[int]:
    """The token ids of a handle; their indices must be 0, 1, 2, ..."""
    rows = []
    for output in (frame["output"] for frame in frames if "output" in frame):
        columns = zip(output.get("handle", ()), output.get("index", ()), output.get("token_id", ()), strict=True)
        rows += [(index, token_id) for owner, index, token_id in columns if owner == handle]
    assert [index for index, _ in rows] == list(range(len(rows)))
    return [token_id for _, token_id in rows]


def answer(router: Peer, handle: int, **more: Any) -> list[int]:
    router.send(**submit(handle, **more))
    frames = router.until(ends(handle))
    assert "failed" not in frames[-1]["output"], frames[-1]
    return tokens(frames, handle)


@pytest.mark.parametrize("version", ["earlier", "newer"])
def test_a_router_of_another_version_is_served(processes: Processes, version: str) -> None:
    node = processes.worker()
    router, hello = connected(processes, node.grpc_address, version)
    assert (hello["hello"]["node_id"], hello["hello"]["beat"]["model"]) == ("today", "demo")
    first = answer(router, 1)
    assert len(first) == 24
    router.send(beat={"sequence": 3})
    assert router.until(lambda frame: "ack" in frame)[-1]["ack"]["sequence"] == "3"
    router.send(**submit(2, max_tokens=MANY))
    router.until(lambda frame: 2 in frame.get("output", {}).get("handle", ()))
    router.send(cancel={"handle": 2})
    assert answer(router, 3) == first, "after a cancel the stream goes on"
    idle = router.until(lambda frame: "beat" in frame and not frame["beat"].get("load", {}).get("running"))
    assert not tokens(idle, 2), "what is cancelled sends nothing more"
    router.send(**submit(4, model="unknown"))
    failed = router.until(ends(4))[-1]["output"]["failed"]
    assert failed[0]["reason"] == "MODEL_NOT_SERVED"


def test_an_earlier_router_gets_the_first_of_two_models(processes: Processes) -> None:
    further = processes.copy_of_demo("second")
    node = processes.worker(more_models=str(further))
    router, hello = connected(processes, node.grpc_address)
    assert hello["hello"]["node_id"] == "today"
    beat = router.until(lambda frame: "hello.beat.10" in frame["unknown"] or "beat.10" in frame["unknown"])[-1]
    assert beat["beat"]["model"] == "demo", "the names of the others are a field that it does not know"
    assert len(answer(router, 1)) == 24
    router.send(**submit(2, model="second"))
    failed = router.until(ends(2))[-1]["output"]["failed"]
    assert failed[0]["reason"] == "MODEL_NOT_SERVED"
