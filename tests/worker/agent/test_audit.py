"""What operators do at a node is in its log and its audit file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.rpc import status
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

DEMO = Path(__file__).parents[3] / "shared" / "ryzanstein" / "demo"


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return status.error_from_rpc(failure.value).reason


async def test_each_act_is_one_record_in_the_log_and_in_the_file_whatever_the_level(start_node: Any, tmp_path: Path) -> None:
    file = tmp_path / "audit" / "acts.jsonl"
    node = start_node("--audit-file", str(file), model=None)
    async with open_channel(await asyncio.to_thread(lambda: node.address)) as channel:
        stub = WorkerServiceStub(channel)
        await stub.LoadModel(pb.LoadModelRequest(model="m", path=str(DEMO)), timeout=60)
        await stub.Drain(pb.DrainRequest(), timeout=30)
        await stub.Undrain(pb.UndrainRequest(), timeout=30)
        assert await reason_of(stub.Profile(pb.ProfileRequest(rank=9), timeout=30)) == "INVALID_ARGUMENT"
        await stub.UnloadModel(pb.UnloadModelRequest(model="m"), timeout=30)
        assert await reason_of(stub.UnloadModel(pb.UnloadModelRequest(model="m"), timeout=30)) == "MODEL_NOT_FOUND"
        assert await reason_of(stub.LoadModel(pb.LoadModelRequest(model="m"), timeout=30)) == "INVALID_ARGUMENT"
        written = [json.loads(line) for line in file.read_text().splitlines()]
        ended = written[1::2]
        assert [each["id"] for each in written[::2]] == [each["id"] for each in ended], "intent, then outcome"
        assert [(each["method"], each["target"], each["outcome"], each["reason"]) for each in ended] == [
            ("LoadModel", "m", "done", ""),
            ("Drain", "node-t", "done", ""),
            ("Undrain", "node-t", "done", ""),
            ("Profile", "", "refused", "INVALID_ARGUMENT"),
            ("UnloadModel", "m", "done", ""),
            ("UnloadModel", "m", "refused", "MODEL_NOT_FOUND"),
            ("LoadModel", "m", "refused", "INVALID_ARGUMENT"),
        ]
        assert ended[0]["after"]["path"] == str(DEMO)
        assert {each["node_id"] for each in written} == {"node-t"}
        logged = [each for each in node.events if each.get("audit") and each["event"] == "audit"]
        assert [each["id"] for each in logged] == [each["id"] for each in ended]
        file.unlink()
        file.parent.rmdir()
        assert await reason_of(stub.Drain(pb.DrainRequest(), timeout=30)) == "AUDIT_UNAVAILABLE"
        assert (await stub.GetStatus(pb.GetStatusRequest(), timeout=10)).beat.state == pb.NODE_STATE_STARTING
