"""What operators do at the orchestrator is recorded in its database, and read by `ListAudit`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from ryzanstein.auth.audit.audit_record import AuditRecord
from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.state.audit_table import MOST_ROWS, AuditQuery, write_record
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.stored import StoredMembership
from ryzanstein.rpc import status
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2_grpc as pb_grpc
from ryzanstein.v1 import worker_pb2

VERSION_2 = Path(__file__).parent / "databases" / "version-2.sqlite"


def deploy(model="m", path="/m"):
    return pb.DeployModelRequest(deployment=pb.Deployment(model=model, path=path))


ACTS = [
    ("DeployModel", deploy(), "m"),
    ("RemoveModel", pb.RemoveModelRequest(model="m"), "m"),
    ("DrainNode", pb.DrainNodeRequest(node_id="a"), "a"),
    ("UndrainNode", pb.UndrainNodeRequest(node_id="a"), "a"),
]
REFUSED = [
    ("DeployModel", deploy(path=""), "INVALID_ARGUMENT"),
    ("RemoveModel", pb.RemoveModelRequest(model="nothing"), "DEPLOYMENT_NOT_FOUND"),
    ("DrainNode", pb.DrainNodeRequest(node_id="nobody"), "NODE_NOT_FOUND"),
    ("UndrainNode", pb.UndrainNodeRequest(node_id="two words"), "INVALID_ARGUMENT"),
]


async def acts(serving, **query):
    return list((await serving.stub.ListAudit(pb.ListAuditRequest(**query), timeout=10)).acts)


async def reason_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return status.error_from_rpc(failure.value).reason


async def test_each_act_that_is_done_is_one_record_with_what_it_changed(serving):
    await serving.register("a")
    for method, request, _ in ACTS:
        await getattr(serving.stub, method)(request, timeout=10, metadata=[("x-request-id", f"r-{method}")])
    found = (await acts(serving))[::-1]
    assert [(each.method, each.target, each.outcome, each.reason) for each in found] == [
        (method, target, "done", "") for method, _, target in ACTS
    ]
    assert [each.request_id for each in found] == [f"r-{method}" for method, *_ in ACTS]
    assert all(each.via.startswith("ipv4:127.0.0.1:") and each.actor == "" and each.time.seconds for each in found)
    stored = {"path": "/m", "replicas": 0, "revision": 1, "idle_unload_s": 0.0}
    states = [tuple(json.loads(text) if text else None for text in (each.before, each.after)) for each in found]
    assert states == [
        (None, stored),
        (stored, None),
        ({"drain_requested": False}, {"drain_requested": True}),
        ({"drain_requested": True}, {"drain_requested": False}),
    ]


async def test_each_act_that_is_refused_is_one_record_and_so_is_each_that_fails(serving, monkeypatch):
    for method, request, reason in REFUSED:
        assert await reason_of(getattr(serving.stub, method)(request, timeout=10)) == reason
    await serving.stub.DeployModel(deploy("kept"), timeout=10)
    await serving.register("a")
    store = serving.control._store

    def fail(*_):
        raise sqlite3.OperationalError("disk I/O error")

    failing = [deploy("kept", "/new"), pb.RemoveModelRequest(model="kept"), *(request for _, request, _ in ACTS[2:])]
    once = [("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(serving.address, options=once) as channel:
        with monkeypatch.context() as broken:
            broken.setattr(store, "_write", fail)
            broken.setattr(store, "_save_membership", fail)
            for (method, *_), request in zip(ACTS, failing, strict=True):
                call = getattr(pb_grpc.OrchestratorServiceStub(channel), method)(request, timeout=10)
                assert await reason_of(call) == "STORE_UNAVAILABLE"
    found = (await acts(serving))[::-1]
    assert [(each.method, each.outcome, each.reason) for each in found] == [
        *((method, "refused", reason) for method, _, reason in REFUSED),
        ("DeployModel", "done", ""),
        *((method, "failed", "STORE_UNAVAILABLE") for method, *_ in ACTS),
    ]


async def test_a_page_ends_where_the_next_begins(serving):
    for number in range(7):
        await serving.stub.DeployModel(deploy(f"m-{number}"), timeout=10)
    await serving.stub.RemoveModel(pb.RemoveModelRequest(model="m-3"), timeout=10)
    pages, token = [], ""
    while not pages or token:
        page = await serving.stub.ListAudit(pb.ListAuditRequest(page_size=3, page_token=token), timeout=10)
        pages.append([each.target for each in page.acts])
        token = page.next_page_token
    assert pages == [["m-3", "m-6", "m-5"], ["m-4", "m-3", "m-2"], ["m-1", "m-0"]]
    assert [each.target for each in await acts(serving, method="RemoveModel")] == ["m-3"]
    assert [each.method for each in await acts(serving, target_prefix="m-3")] == ["RemoveModel", "DeployModel"]
    for wrong in ({"page_size": 501}, {"page_token": "-1"}, {"page_token": "9" * 19}, {"page_token": "\N{SUPERSCRIPT TWO}"}):
        assert await reason_of(serving.stub.ListAudit(pb.ListAuditRequest(**wrong), timeout=10)) == "INVALID_ARGUMENT"


async def test_the_oldest_acts_go_beyond_the_bound(tmp_path, telemetry):
    store = await Store.open(tmp_path / "o.sqlite", telemetry)

    def fill():
        row = ("", "", "DrainNode", "n", "", "done", "", None, None)
        rows = ((f"id-{number}", 0.0, *row) for number in range(MOST_ROWS))
        with store._connection:
            store._connection.execute("BEGIN")
            store._connection.executemany(f"INSERT INTO audit VALUES (NULL{', ?' * 11})", rows)
        for number in range(3):
            write_record(store._connection, AuditRecord(f"new-{number}", 0.0, "", "", "DrainNode", "n", ""))
        return store._connection.execute("SELECT count(*), min(number) FROM audit").fetchone()

    assert await store._run("audit", fill) == (100_000, 4)
    assert [each.id for each in (await store.audit(AuditQuery(2))).records] == ["new-2", "new-1"]
    assert (await store.audit(AuditQuery(10, before=8))).next == 0
    await store.close()


async def test_a_database_of_version_2_keeps_what_it_has_and_takes_records(tmp_path, telemetry):
    """The file was made by the code before the audit."""
    path = tmp_path / "o.sqlite"
    shutil.copy(VERSION_2, path)
    for number in range(2):
        store = await Store.open(path, telemetry)
        assert await store.deployments() == (Deployment("m", "/models/m", 2, 3, 60.5),)
        assert await store.membership() == StoredMembership(frozenset("ab"), {"a": "1"})
        await store.write(AuditRecord(f"id-{number}", 1.5, "a", "v", "DrainNode", "n", "r", before={"drain_requested": False}))
        records = (await store.audit(AuditQuery(10))).records
        assert [each.id for each in records] == ["id-1", "id-0"][1 - number :]
        assert records[-1].before == {"drain_requested": False}
        await store.close()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("full", ["database", "file"])
async def test_a_full_disk_refuses_acts_while_nodes_beat_and_routers_watch(small_disk, tmp_path, full, serving_at):
    file = (small_disk if full == "file" else tmp_path) / "audit.jsonl"
    database = (small_disk if full == "database" else tmp_path) / "o.sqlite"
    async with serving_at(database=database, audit_file=file) as serving:
        await serving.stub.DeployModel(deploy(), timeout=10)
        grant = await serving.register("a")
        filler = small_disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as disk:
            while disk.write(bytes(4096)):
                pass
        refused = 0
        for _ in range(40):  # a log and a page of the file have some room left
            with suppress(grpc.aio.AioRpcError):
                await serving.stub.DrainNode(pb.DrainNodeRequest(node_id="a"), timeout=10)
                continue
            refused += 1
        assert refused > 0
        nodes = (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes
        before = nodes[0].drain_requested
        assert await reason_of(serving.stub.DeployModel(deploy("more"), timeout=10)) == "AUDIT_UNAVAILABLE"
        assert await reason_of(serving.stub.UndrainNode(pb.UndrainNodeRequest(node_id="a"), timeout=10)) == "AUDIT_UNAVAILABLE"
        assert serving.telemetry.audit_failures.labels("intent")._value.get() >= 2
        listed = (await serving.stub.ListDeployments(pb.ListDeploymentsRequest())).deployments
        assert [each.deployment.model for each in listed] == ["m"]
        assert (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes[0].drain_requested == before
        watch, beats = serving.stub.WatchCluster(pb.WatchClusterRequest()), serving.stub.Heartbeat()
        assert (await asyncio.wait_for(watch.read(), 10)).snapshot.nodes[0].node_id == "a"
        beat = worker_pb2.Beat(state=worker_pb2.NODE_STATE_READY)
        await beats.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id, beat=beat))
        assert (await asyncio.wait_for(beats.read(), 10)).plural
        beats.cancel()
        watch.cancel()
        filler.unlink()
        await serving.stub.DeployModel(deploy("more"), timeout=10)


async def test_a_database_that_is_gone_refuses_acts(serving, tmp_path):
    (tmp_path / "orchestrator.sqlite").unlink()
    assert await reason_of(serving.stub.DeployModel(deploy(), timeout=10)) == "AUDIT_UNAVAILABLE"
    assert not (await serving.stub.ListDeployments(pb.ListDeploymentsRequest())).deployments


async def test_an_orchestrator_killed_in_an_act_leaves_its_intent(tmp_path, telemetry, eventually):
    """The deployment waits for a node that never measures the directory."""
    database, file = tmp_path / "o.sqlite", tmp_path / "audit.jsonl"
    flags = ("--database", str(database), "--audit-file", str(file), "--grpc-port", "0")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "ryzanstein.orchestrator", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(30):
            while (event := json.loads(await child.stderr.readline())).get("event") != "serving":
                pass
            async with open_channel(f"127.0.0.1:{event['grpc_port']}") as channel:
                stub = pb_grpc.OrchestratorServiceStub(channel)
                node = pb.Node(node_id="a", address="h:1", incarnation="1", tp=1, memory_bytes=2**30)
                await stub.RegisterNode(pb.RegisterNodeRequest(node=node))
                call = stub.DeployModel(deploy())

                async def is_written():
                    listed = (await stub.ListAudit(pb.ListAuditRequest())).acts
                    return file.exists() and file.read_text() and [each.outcome for each in listed] == ["unknown"]

                await eventually(is_written, "the intent")
                child.send_signal(signal.SIGKILL)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.communicate()
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    store = await Store.open(database, telemetry)
    (kept,) = (await store.audit(AuditQuery(10))).records
    assert (kept.id, kept.method, kept.target, kept.outcome) == (line["id"], "DeployModel", "m", "unknown")
    assert await store.deployments() == ()
    await store.close()


async def test_the_command_shows_them(serving):
    for number in range(3):
        await serving.stub.DeployModel(deploy(f"m-{number}"), timeout=10)

    async def run(*words):
        command = [sys.executable, "-P", "-m", "ryzanstein.cli", "audit", "--orchestrator", serving.address, *words]
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
        child = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        return (await child.communicate())[0].decode()

    shown, table = await asyncio.gather(run("--limit", "2", "--json"), run("--target", "m-0"))
    assert [(each["target"], each["outcome"], each["after"]["path"]) for each in json.loads(shown)["acts"]] == [
        ("m-2", "done", "/m"),
        ("m-1", "done", "/m"),
    ]
    assert ("m-0" in table, "m-1" in table, "DeployModel" in table) == (True, False, True)
