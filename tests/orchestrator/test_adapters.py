"""Adapters at the orchestrator: stated, kept over restarts, told to nodes once, refused by name."""

from __future__ import annotations

import sqlite3
from typing import Any

import grpc
import pytest

from ryzanstein.adapters import DeployedAdapter
from ryzanstein.cluster import Deployment
from ryzanstein.errors import RyzansteinError
from ryzanstein.orchestrator.state import adapters
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker


def adapter(name: str = "a", **more: Any) -> pb.DeployAdapterRequest:
    return pb.DeployAdapterRequest(adapter=pb.DeployedAdapter(**{"name": name, "model": "m", "path": "/adapters/a", **more}))


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = error_from_rpc(failure.value)
    return error.reason, error.violations[0].field if error.violations else ""


class Node:
    """A node's beats that say which adapters it was told last."""

    def __init__(self, serving: Any, lease_id: str) -> None:
        self._call, self._lease_id = serving.stub.Heartbeat(), lease_id
        self.digest: bytes | None = b""

    async def beat(self) -> pb.DeployedAdapters | None:
        """Returns what it is told."""
        beat = worker.Beat(sequence=1, state=worker.NODE_STATE_READY, model="m")
        await self._call.write(
            pb.HeartbeatRequest(node_id="a", lease_id=self._lease_id, beat=beat, adapters_digest=self.digest)
        )
        self.answer = await self._call.read()
        return self.answer.adapters if self.answer.HasField("adapters") else None


async def test_adapters_are_revised_listed_and_there_after_a_restart(serving_at: Any) -> None:
    async with serving_at() as serving:
        assert (await serving.stub.DeployAdapter(adapter())).adapter.revision == 1
        assert (await serving.stub.DeployAdapter(adapter(pinned=True))).adapter.revision == 2, "its files are read again"
        await serving.stub.DeployAdapter(adapter("gone"))
        await serving.stub.RemoveAdapter(pb.RemoveAdapterRequest(name="gone"))
        assert (await serving.stub.DeployAdapter(adapter("gone"))).adapter.revision == 2, "nodes may still have revision 1"
        await serving.stub.RemoveAdapter(pb.RemoveAdapterRequest(name="gone"))
    async with serving_at() as serving:
        (found,) = (await serving.stub.ListDeployedAdapters(pb.ListDeployedAdaptersRequest())).adapters
        assert found == pb.DeployedAdapter(name="a", model="m", path="/adapters/a", pinned=True, revision=2)
        assert [act.method for act in (await serving.stub.ListAudit(pb.ListAuditRequest())).acts[:2]] == [
            "RemoveAdapter",
            "DeployAdapter",
        ]


async def test_a_node_is_told_once_whenever_they_change(serving: Any) -> None:
    node = Node(serving, (await serving.register("a")).lease_id)
    assert await node.beat() is None, "there is nothing to tell"
    await serving.stub.DeployAdapter(adapter())
    told = await node.beat()
    assert told is not None
    assert [each.name for each in told.adapters] == ["a"]
    node.digest = told.digest
    assert await node.beat() is None
    await serving.stub.RemoveAdapter(pb.RemoveAdapterRequest(name="a"))
    told = await node.beat()
    assert told is not None
    assert (told.digest, list(told.adapters)) == (b"", [])
    await serving.stub.DeployAdapter(adapter())
    node.digest = None
    assert await node.beat() is None, "an older node would not understand it"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "adapter.name"),
        ({"name": "x" * 300}, "adapter.name"),
        ({"name": "m"}, "adapter.name"),
        ({"name": "n" * 4096}, "adapter.name"),
        ({"name": "a\nb"}, "adapter.name"),
        ({"name": "demo\u202eomed"}, "adapter.name"),
        ({"model": ""}, "adapter.model"),
        ({"path": ""}, "adapter.path"),
        ({"path": "here"}, "adapter.path"),
        ({"path": "/a\0b"}, "adapter.path"),
        ({"path": "/" + "x" * 1024}, "adapter.path"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_field(serving: Any, fields: dict[str, str], field: str) -> None:
    assert await refusal(serving.stub.DeployAdapter(adapter(**fields))) == ("INVALID_ARGUMENT", field)
    assert not (await serving.stub.ListDeployedAdapters(pb.ListDeployedAdaptersRequest())).adapters


async def test_a_name_is_a_models_or_an_adapters(serving: Any) -> None:
    await serving.control.deploy(Deployment("taken", "/m"))
    assert (await refusal(serving.stub.DeployAdapter(adapter("taken"))))[0] == "DEPLOYMENT_EXISTS"
    await serving.stub.DeployAdapter(adapter("b"))
    deploying = serving.stub.DeployModel(pb.DeployModelRequest(deployment=pb.Deployment(model="b", path="/m")))
    assert (await refusal(deploying))[0] == "ADAPTER_EXISTS"
    assert (await refusal(serving.stub.RemoveAdapter(pb.RemoveAdapterRequest(name="nobody"))))[0] == "ADAPTER_NOT_FOUND"


async def test_a_name_is_not_that_of_a_model_that_a_node_was_started_with(serving: Any) -> None:
    node = Node(serving, (await serving.register("a")).lease_id)
    await node.beat()
    assert [each.model for each in serving.control.nodes()] == ["m"]
    assert (await refusal(serving.stub.DeployAdapter(adapter("m", model="other"))))[0] == "MODEL_EXISTS"


async def test_beats_do_not_grow_with_the_adapters_that_a_node_knows(serving: Any) -> None:
    node = Node(serving, (await serving.register("a")).lease_id)
    await node.beat()
    before = node.answer.ByteSize()
    for number in range(100):
        await serving.control.deploy_adapter(DeployedAdapter(f"adapter-{number}", "m", f"/adapters/{number}"))
    told = await node.beat()
    assert told is not None
    assert len(told.adapters) == 100
    node.digest = told.digest
    assert await node.beat() is None
    assert node.answer.ByteSize() == before


def test_more_than_there_may_be_are_refused_with_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 3)
    table = adapters.AdapterTable()
    for name in "abc":
        table.put(table.revised(DeployedAdapter(name, "m", "/a")))
    with pytest.raises(RyzansteinError, match="bounds are 3") as refused:
        table.revised(DeployedAdapter("d", "m", "/a"))
    assert (refused.value.reason, refused.value.metadata) == ("TOO_MANY_ADAPTERS", {"bound": "3"})
    assert table.revised(DeployedAdapter("a", "m", "/b")).revision == 2
    monkeypatch.setattr(adapters, "MAX_TEXT_CHARS", 20)
    with pytest.raises(RyzansteinError, match="20 characters"):
        table.revised(DeployedAdapter("a", "m", "/" + "x" * 20))


async def test_a_file_of_before_adapters_gets_their_table(tmp_path: Any, telemetry: Any) -> None:
    path = tmp_path / "o.sqlite"
    store = await Store.open(path, telemetry)
    await store.put_deployment(Deployment("m", "/m"))
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE adapters")
    connection.close()
    store = await Store.open(path, telemetry)
    assert await store.adapters() == ()
    assert [each.model for each in await store.deployments()] == ["m"]
    await store.close()
