"""A generation is its tenant's: another tenant cannot read or cancel it, at any router, over any face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

BLUE, RED = (("x-tenant-id", "blue"),), (("x-tenant-id", "red"),)
NOBODY: tuple[tuple[str, str], ...] = ()
ROUTERS = ("router-0", "router-1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, num_routers=2, tp=1)) as started:
        yield started


class Caller:
    """Somebody who names a tenant, at one router."""

    def __init__(self, cluster: LocalCluster, router: str, client: Any, tenant: tuple[tuple[str, str], ...]) -> None:
        self._client, self._tenant = client, tenant
        self._http_url = cluster.http_url_of(router)

    def begin(self, max_tokens: int = 1500) -> Any:
        """Begins a long answer; returns its stream and its id."""
        chat = self._client.request("Count from 1 to 100.", max_tokens=max_tokens, ignore_eos=True)
        stream = self._client.inference.StreamChat(
            inference.StreamChatRequest(chat=chat), timeout=60, metadata=(*self._tenant, ("x-run-detached", "true"))
        )
        return stream, next(stream).event.started.generation_id

    def attach(self, generation_id: str) -> int:
        """Returns 200 if the generation can be read over gRPC, else the status over HTTP of its refusal."""
        request = inference.AttachGenerationRequest(generation_id=generation_id)
        call = self._client.inference.AttachGeneration(request, timeout=20, metadata=self._tenant)
        try:
            next(call)
        except grpc.RpcError as refused:
            return status(refused)
        call.cancel()
        return 200

    def cancel(self, generation_id: str) -> int:
        request = inference.CancelGenerationRequest(generation_id=generation_id)
        try:
            self._client.inference.CancelGeneration(request, timeout=20, metadata=self._tenant)
        except grpc.RpcError as refused:
            return status(refused)
        return 200

    def events(self, generation_id: str) -> int:
        url = f"{self._http_url}/v1/generations/chatcmpl-{generation_id}/events"
        with httpx.stream("GET", url, headers=dict(self._tenant), timeout=20) as answer:
            return answer.status_code

    def delete(self, generation_id: str) -> int:
        url = f"{self._http_url}/v1/generations/chatcmpl-{generation_id}"
        return httpx.delete(url, headers=dict(self._tenant), timeout=20).status_code

    def cancel_response(self, generation_id: str) -> int:
        url = f"{self._http_url}/v1/responses/resp_{generation_id}/cancel"
        return httpx.post(url, headers=dict(self._tenant), timeout=20).status_code

    def on_a_socket(self, generation_id: str, kind: str) -> int:
        url = self._http_url.replace("http://", "ws://") + "/v1/ws"
        fields = {"id": "a"} if kind == "attach" else {}
        with connect(url, subprotocols=[Subprotocol("ryzanstein.v1")], additional_headers=dict(self._tenant)) as socket:
            socket.send(json.dumps({"type": kind, "generation": f"chatcmpl-{generation_id}", **fields}))
            frame = json.loads(socket.recv(20))
            return int(frame["status"]) if frame["type"] == "error" else 200

    def reads(self, generation_id: str) -> list[int]:
        return [self.attach(generation_id), self.events(generation_id), self.on_a_socket(generation_id, "attach")]

    def cancels(self, generation_id: str) -> list[int]:
        ways = (self.cancel, self.delete, self.cancel_response)
        return [*(way(generation_id) for way in ways), self.on_a_socket(generation_id, "cancel")]


def status(refused: grpc.RpcError) -> int:
    return {grpc.StatusCode.NOT_FOUND: 404}.get(refused.code(), 500)


@pytest.fixture
def caller(cluster: LocalCluster, client_of: Any) -> Iterator[Any]:
    clients = {router: client_of(cluster.services[router].grpc_address) for router in ROUTERS}
    yield lambda router, tenant: Caller(cluster, router, clients[router], tenant)
    for client in clients.values():
        client.close()


@pytest.mark.long
def test_another_tenant_can_neither_read_nor_cancel_it_and_its_own_can(caller: Any) -> None:
    stream, generation_id = caller("router-0", BLUE).begin()
    for router in ROUTERS:
        assert caller(router, RED).cancels(generation_id) == [404] * 4, router
        assert caller(router, RED).reads(generation_id) == [404] * 3, router
    for router in ROUTERS:
        assert caller(router, BLUE).reads(generation_id) == [200] * 3, router
        assert caller(router, NOBODY).reads(generation_id) == [200] * 3, router
    assert caller("router-1", BLUE).cancel(generation_id) == 200
    reasons = [response.event.finished.finish_reason for response in stream if response.event.HasField("finished")]
    assert reasons == [inference.FINISH_REASON_CANCELLED]


def test_what_is_refused_is_refused_as_if_it_never_was(cluster: LocalCluster, caller: Any) -> None:
    stream, generation_id = caller("router-0", BLUE).begin()
    bodies = []
    for response_id in (generation_id, "0" * 32):
        url = f"{cluster.http_url_of('router-0')}/v1/generations/chatcmpl-{response_id}"
        bodies.append(httpx.delete(url, headers=dict(RED), timeout=20).json()["error"])
    known, unknown = bodies
    assert known["message"].replace(generation_id, "ID") == unknown["message"].replace("0" * 32, "ID")
    assert known["code"] == unknown["code"]
    assert caller("router-0", BLUE).cancel(generation_id) == 200
    stream.cancel()


def test_a_tenant_s_name_is_checked_as_with_a_request(caller: Any) -> None:
    strange = (("x-tenant-id", "two words"),)
    assert caller("router-0", strange).delete("0" * 32) == 400


def test_it_stays_so_when_another_router_takes_it_over(cluster: LocalCluster, caller: Any) -> None:
    _, generation_id = caller("router-0", BLUE).begin()
    cluster.kill("router-0")
    assert caller("router-1", RED).reads(generation_id) == [404] * 3
    assert caller("router-1", RED).cancels(generation_id) == [404] * 4
    assert caller("router-1", BLUE).reads(generation_id) == [200] * 3
    assert caller("router-1", BLUE).cancel(generation_id) == 200
