"""`python -P -m ryzanstein.orchestrator` as a process: its exit codes, and what a restart keeps."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2_grpc as pb_grpc

pytestmark = pytest.mark.cluster


@dataclass
class Process:
    child: asyncio.subprocess.Process
    log: list

    @property
    def serving(self):
        return self.log[-1]

    @property
    def address(self):
        return f"127.0.0.1:{self.serving['grpc_port']}"

    async def end(self, number=signal.SIGTERM):
        self.child.send_signal(number)
        self.child.send_signal(signal.SIGCONT)
        return await asyncio.wait_for(self.child.wait(), 20)


async def spawn(*flags):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ryzanstein.orchestrator", *flags, stderr=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def running(database, port=0, *flags):
    child = await spawn("--database", str(database), "--grpc-port", str(port), *flags)
    log = []
    try:
        async with asyncio.timeout(30):
            while not log or log[-1].get("event") != "serving":
                line = await child.stderr.readline()
                assert line, f"ended before serving: {log}"
                log.append(json.loads(line))
        reading = asyncio.create_task(child.stderr.read())
        yield Process(child, log)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await reading


@asynccontextmanager
async def stub_of(process):
    async with open_channel(process.address) as channel:
        yield pb_grpc.OrchestratorServiceStub(channel)


async def _read_to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def join(stub, node_id, incarnation="1"):
    node = pb.Node(node_id=node_id, address="127.0.0.1:1", incarnation=incarnation, tp=1)
    grant = await stub.RegisterNode(pb.RegisterNodeRequest(node=node), timeout=10, wait_for_ready=True)
    beats = stub.Heartbeat()
    await beats.write(pb.HeartbeatRequest(node_id=node_id, lease_id=grant.lease_id))
    await asyncio.wait_for(beats.read(), 10)
    return grant, beats


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_keeps_deployments_and_drain_requests_and_waits_for_the_members(tmp_path, number):
    database = tmp_path / "o.sqlite"
    async with running(database) as process, stub_of(process) as stub:
        for node_id in ("a", "b"):
            await join(stub, node_id)
        await stub.DeployModel(pb.DeployModelRequest(deployment=pb.Deployment(model="m", path="/m", replicas=2)))
        await stub.DrainNode(pb.DrainNodeRequest(node_id="b"))
        watch = stub.WatchCluster(pb.WatchClusterRequest())
        epoch = (await watch.read()).snapshot.epoch
        assert await process.end(number) == (0 if number == signal.SIGTERM else -number)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asyncio.wait_for(_read_to_the_end(watch), 10)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    async with running(database, 0, "--tuning", '{"settle_s": 60}') as process, stub_of(process) as stub:
        assert not (await stub.ListNodes(pb.ListNodesRequest())).nodes
        watch = stub.WatchCluster(pb.WatchClusterRequest())
        first = asyncio.ensure_future(watch.read())
        await join(stub, "a")
        assert not first.done(), "a snapshot without b would make routers forget it"
        await join(stub, "b")
        snapshot = (await asyncio.wait_for(first, 10)).snapshot
        assert {node.node_id: node.drain_requested for node in snapshot.nodes} == {"a": False, "b": True}
        assert [(d.model, d.path, d.replicas) for d in snapshot.deployments] == [("m", "/m", 2)]
        assert snapshot.epoch != epoch
        watch.cancel()


async def test_health_reflection_and_metrics_are_served(tmp_path):
    async with running(tmp_path / "o.sqlite") as process, open_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "readiness", "startup"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
        await join(pb_grpc.OrchestratorServiceStub(channel), "a")
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{process.serving['metrics_port']}/metrics")).text
        assert "\nryzanstein_orchestrator_nodes 1.0\n" in text
        assert "\nryzanstein_orchestrator_beats_total 1.0\n" in text
        assert await process.end(signal.SIGINT) == 0


async def test_sigstop_for_longer_than_the_lease_costs_no_member(tmp_path):
    flags = ("--lease-s", "1.5", "--tuning", '{"heartbeat_interval_s": 0.2}')
    async with running(tmp_path / "o.sqlite", 0, *flags) as process, stub_of(process) as stub:
        watch = stub.WatchCluster(pb.WatchClusterRequest())
        await watch.read()
        grant, beats = await join(stub, "a")
        assert (await watch.read()).delta.node.node_id == "a"
        process.child.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        process.child.send_signal(signal.SIGCONT)
        for _ in range(5):
            await beats.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id))
            assert await asyncio.wait_for(beats.read(), 10) is not grpc.aio.EOF
        assert [node.node_id for node in (await stub.ListNodes(pb.ListNodesRequest())).nodes] == ["a"]
        watch.cancel()
        beats.cancel()


async def test_settings_of_an_earlier_release_are_taken_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("RYZANSTEIN_HEARTBEAT_INTERVAL_S", "0.25")
    async with running(tmp_path / "o.sqlite", 0, "--max-nodes", "1") as process, stub_of(process) as stub:
        grant, beats = await join(stub, "a")
        assert grant.heartbeat_interval.ToMilliseconds() == 250
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await join(stub, "b")
        beats.cancel()
    warnings = {event["setting"]: event["use"] for event in process.log if event["level"] == "warning"}
    assert warnings == {
        "heartbeat_interval_s": "tuning.heartbeat_interval_s",
        "max_nodes": "tuning.max_nodes",
    }


async def exit_of(*flags):
    child = await spawn(*flags)
    _, errors = await asyncio.wait_for(child.communicate(), 30)
    return child.returncode, errors.decode()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--grpc-port", "70000"), "grpc_port"),
        (("--grpc-port", "many"), "grpc_port"),
        (("--lease-s", "0.2", "--tuning", '{"heartbeat_interval_s": 0.2}'), "lease_s"),
        (("--log-level", "loud"), "log_level"),
        (("--no-such-flag", "1"), "--no-such-flag"),
    ],
)
async def test_bad_settings_end_with_2_and_name_the_setting(flags, named):
    code, errors = await exit_of(*flags)
    assert (code, named in errors, "Traceback" in errors) == (2, True, False)


async def test_a_port_in_use_ends_with_1(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors = await exit_of("--database", str(tmp_path / "o.sqlite"), "--grpc-port", str(port))
    assert (code, "Traceback" in errors) == (1, False)
    assert f"cannot listen on 127.0.0.1:{port}" in errors


async def test_a_database_in_use_ends_with_1_and_names_the_file(tmp_path):
    async with running(tmp_path / "o.sqlite"):
        code, errors = await exit_of("--database", str(tmp_path / "o.sqlite"), "--grpc-port", "0")
    assert (code, "o.sqlite" in errors, "Traceback" in errors) == (1, True, False)
