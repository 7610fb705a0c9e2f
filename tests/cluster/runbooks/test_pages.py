"""Every page of docs/runbooks is lived through: the fault is real, and so is each command and each expression of the page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
import pytest

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

pytestmark = [pytest.mark.timeout(240)]

SKIP_COLLECTIVE = signal.SIGRTMIN + 1


def chat(text: str, **more: Any) -> inference.StreamChatRequest:
    sampling = inference.SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    message = inference.Message(role=inference.ROLE_USER, content=text)
    return inference.StreamChatRequest(chat=inference.ChatRequest(messages=[message], sampling=sampling, **more))


def session_on(world: Any, node_id: str) -> str:
    """The id of a session that belongs to the node."""
    with grpc.insecure_channel(world.cluster.router_address) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        for number in range(64):
            request = chat("Hello!", session_id=f"near-{node_id}-{number}").chat
            request.sampling.max_tokens = 1
            if stub.Chat(request, timeout=30).node_id == node_id:
                return request.session_id
    pytest.fail(f"no session belongs to {node_id}")


def test_node_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "node-died", world.variables("node-1"))
        page.run(load=load, strike=lambda: world.cluster.kill("node-1"), heal=lambda: world.cluster.restart("node-1"))
    assert load.failures == []


def test_node_frozen(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "node-frozen", world.variables("node-1"))
        page.run(load=load, strike=lambda: world.cluster.kill("node-1", signal.SIGSTOP))
    assert load.failures == []


def test_rank_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "rank-died", world.variables("node-0", RANK="1"))
        page.run(load=load, strike=lambda: os.kill(world.ranks("node-0")[1].pid, signal.SIGKILL))
    assert load.failures == []


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGSTOP, "0"), (SKIP_COLLECTIVE, "1")], ids=["frozen", "skipped"])
def test_rank_stalled(world: Any, walk: Any, all_ready: None, number: int, rank: str) -> None:
    with world.load() as load:
        page = walk(world, "rank-stalled", world.variables("node-0", RANK=rank))
        page.run(load=load, strike=lambda: os.kill(world.ranks("node-0")[int(rank)].pid, number))
    assert load.failures == []


def test_orchestrator_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load(1) as load:
        page = walk(world, "orchestrator-died", world.variables("node-1"))
        page.run(
            load=load, strike=lambda: world.cluster.kill("orchestrator"), heal=lambda: world.cluster.restart("orchestrator")
        )
    assert load.failures == []


def test_orchestrator_unreachable(world: Any, walk: Any, all_ready: None) -> None:
    """The line from the nodes to the orchestrator swallows everything; the router's own stays."""
    with world.load(1) as load:
        page = walk(world, "orchestrator-unreachable", world.variables("node-1"))
        page.run(
            load=load, strike=lambda: world.to_orchestrator.tell("blackhole"), heal=lambda: world.to_orchestrator.tell("pass")
        )
    assert load.failures == []


def test_partition(world: Any, walk: Any, all_ready: None, behind_a_line: Any) -> None:
    """A line that swallows both ways stands for the packet filter; new connections hang in it as well."""
    with world.load() as load:
        page = walk(world, "partition", world.variables("node-1", NODE_PATH=behind_a_line.address))
        page.run(load=load, strike=lambda: behind_a_line.tell("blackhole"), heal=lambda: behind_a_line.tell("pass"))
    assert load.failures == []


def test_far_node(world: Any, walk: Any, all_ready: None, behind_a_line: Any) -> None:
    variables = world.variables("node-1", SESSION=session_on(world, "node-1"))
    with world.load() as load:
        walk(world, "far-node", variables).run(load=load, strike=lambda: behind_a_line.tell("delay 0.5"))
    assert load.failures == []


def test_client_gone(world: Any, walk: Any, all_ready: None) -> None:
    variables = world.variables("node-0")

    def strike() -> None:
        """A reader leaves and comes back; another one leaves for good, and its generation outlives the window of 1 s."""
        for comes_back in (False, True):
            with grpc.insecure_channel(world.cluster.router_address) as channel:
                stub = inference_grpc.InferenceServiceStub(channel)
                stream = stub.StreamChat(chat("Count from 1 to 60."), timeout=30)
                variables["GENERATION"] = next(iter(stream)).event.started.generation_id
                stream.cancel()
                if comes_back:
                    request = inference.AttachGenerationRequest(generation_id=variables["GENERATION"])
                    next(iter(stub.AttachGeneration(request, timeout=30)))

    walk(world, "client-gone", variables).run(strike=strike)


def test_drain(world: Any, walk: Any, all_ready: None) -> None:
    drained = world.variables("node-1")
    command = ("ryzanstein", "drain", "node-1", "--orchestrator", world.cluster.orchestrator_address)

    def strike() -> None:
        subprocess.run([os.path.join(os.path.dirname(sys.executable), command[0]), *command[1:]], check=True, timeout=30)

    def heal() -> None:
        assert world.cluster.services["node-1"].wait_ended(10)
        world.cluster.restart("node-1")

    with world.load() as load:
        walk(world, "drain", drained).run(load=load, strike=strike, heal=heal)
    assert load.failures == []


def test_no_nodes(world: Any, walk: Any, all_ready: None) -> None:
    pids = " ".join(str(world.cluster.services[node_id].pid) for node_id in world.cluster.node_ids)

    def strike() -> None:
        for node_id in world.cluster.node_ids:
            world.cluster.kill(node_id, signal.SIGSTOP)

    with world.load():
        walk(world, "no-nodes", world.variables("node-1", PIDS=pids)).run(strike=strike)


def test_false_alarms(world: Any, walk: Any, all_ready: None) -> None:
    """An agent that stands still for a moment again and again is late as on a machine that is too full."""

    def strike() -> None:
        for _ in range(12):
            world.cluster.kill("node-1", signal.SIGSTOP)
            time.sleep(0.5)
            world.cluster.kill("node-1", signal.SIGCONT)
            time.sleep(0.5)

    with world.load() as load:
        walk(world, "false-alarms", world.variables("node-1")).run(load=load, strike=strike)
    assert load.failures == []


def test_router_died(world: Any, walk: Any, all_ready: None) -> None:
    variables = world.variables("node-1", OTHER_ROUTER=world.cluster.router_addresses[1])
    page = walk(world, "router-died", variables)
    page.run(strike=lambda: world.cluster.kill("router-0"), heal=lambda: world.cluster.restart("router-0"))
